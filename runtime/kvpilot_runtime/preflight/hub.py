"""What the hub says of a model before an engine downloads it, and which of its errors are final."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpilot_formats.untrusted import lines
from kvpilot_runtime.errors import PreflightError

log = logging.getLogger(__name__)


@contextmanager
def refusals(model: str, revision: str | None) -> Iterator[None]:
    """Within it the hub is asked about a model or an adapter.

    Raises:
        PreflightError: ModelNotFound, the hub says that there is no such model or revision, or that it is not for us.
    """
    # Takes a quarter of a second, and a model in a folder does without.
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError:
        raise PreflightError("ModelNotFound", f"model {model!r} is gated: accept its terms on the hub, and give a token of that account (spec.model.tokenSecretRef, or HF_TOKEN)") from None  # fmt: skip  # noqa: E501
    except RepositoryNotFoundError:
        raise PreflightError("ModelNotFound", f"model {model!r}: the hub knows no such model, or shows it only to others; correct the name, or give a token that may read it (spec.model.tokenSecretRef, or HF_TOKEN)") from None  # fmt: skip  # noqa: E501
    except RevisionNotFoundError:
        raise PreflightError("ModelNotFound", f"model {model!r} has no revision {revision!r} on the hub; give a branch, a tag or a commit that it has") from None  # fmt: skip  # noqa: E501


def config_file(model: str, revision: str | None, token: str | None = None) -> Path | None:
    """The config.json of a hub id, in the cache that vLLM reads from too; fetched where it is not there yet.

    None where there is none to be had: the hub cannot be reached (some 20 s, with its client's own attempts), or the
    model has no such file.

    Raises:
        PreflightError: ModelNotFound, as `refusals` has it.
    """
    from huggingface_hub import hf_hub_download

    try:
        with refusals(model, revision):
            return Path(hf_hub_download(model, "config.json", revision=revision, token=token))
    except PreflightError:
        raise
    except (OSError, ValueError) as error:
        log.warning("config.json of %s: %s", model, lines(str(error)))
        return None
