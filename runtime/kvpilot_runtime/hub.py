"""What the hub says of a model before the engine downloads it: its config.json alone."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def config_file(model: str, revision: str | None) -> Path | None:
    """The config.json of a hub id, in the cache that vLLM reads from too; fetched where it is not there yet.

    None where there is none to be had: the hub cannot be reached (some 20 s, with its client's own attempts), refuses,
    or does not know the model. vLLM will meet the same, and says it better.
    """
    # Takes a quarter of a second, and a model in a folder does without.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (OSError, ValueError) as error:
        log.warning("config.json of %s: %s", model, error)
        return None
