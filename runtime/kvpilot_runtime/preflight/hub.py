"""Ask the Hugging Face hub for a model's config.json. Refuse the model if the hub's error is permanent."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpilot_formats.untrusted import lines
from kvpilot_runtime.errors import PreflightError

log = logging.getLogger(__name__)


@contextmanager
def refusals(model: str, revision: str | None) -> Iterator[None]:
    """Raise PreflightError for errors of the hub that no retry can fix: a gated or unknown model or revision."""
    # Import here, because the import takes a quarter of a second, and models in folders do not need it.
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
    """Return the path of a model's config.json in the hub cache. Download the file if it is missing.

    Return None if the model has no such file, or if the hub cannot be reached within about 20 s.
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
