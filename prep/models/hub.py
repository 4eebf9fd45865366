"""Where a model lies: a local pipeline directory, or a snapshot in the Hub's cache; the network only when asked."""

from __future__ import annotations

from pathlib import Path

from prep.errors import ModelError
from prep.parse import Unparsed, hub_id

# What a pipeline is made of, for us: configs, tokenizers and safetensors; never pickles or code.
_PATTERNS = ("model_index.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors")


def locate(model: str | Path, *, download: bool = False) -> Path:
    """The directory of `model`; a Hub id is looked up in the local cache, and fetched when `download` says so.

    Raises `ModelError` (exit 6) when there is none.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        named = hub_id(str(model), "model")
    except Unparsed:
        raise ModelError(f"model {model} is not a directory, and not a Hub id either",
                         hint="name a diffusers pipeline directory, or a Hub id like owner/name") from None
    return _snapshot(named, download)


def _snapshot(named: str, download: bool) -> Path:
    from huggingface_hub import snapshot_download  # here: most runs name a directory, and this import takes 0.3 s
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named, allow_patterns=list(_PATTERNS), local_files_only=not download))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        if download:
            raise ModelError(f"model '{named}' could not be fetched: {error}") from None
        raise ModelError(f"model '{named}' is neither a directory nor in the local Hub cache",
                         hint="name a directory, or add --download to fetch it from the Hub") from None
