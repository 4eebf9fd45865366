"""Weights are all there or the model is refused: a library fills what a file lacks with random numbers and goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.errors import ModelError


def refuse_holes(loaded: Mapping[str, Any], folder: Path) -> None:
    """Raises `ModelError` when tensors of the model below `folder` did not come from its files.

    `loaded` is what `from_pretrained(output_loading_info=True)` says. Tensors that the model has no place for decide no
    value and are passed over: position_ids of old checkpoints, layers beyond those that the config asks for.
    """
    hint = "its config.json and weights are of different models or library versions; fetch both again"
    missing, other = sorted(loaded["missing_keys"]), sorted(str(key) for key, *_ in loaded["mismatched_keys"])
    if missing:
        raise ModelError(f"the weights in {folder} lack {_named(missing)}", hint=hint)
    if other:
        raise ModelError(f"the weights in {folder} have other shapes than its config.json says: {_named(other)}",
                         hint=hint)


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def dtype_keyword(transformers: str) -> str:
    """What `from_pretrained` of this version of transformers calls the dtype; the other spelling warns or fails."""
    major, minor = transformers.split(".")[:2]
    return "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"


def quiet_libraries() -> None:
    """Only errors from now on, and no progress bars of theirs beside ours."""
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    quiet_transformers()


def quiet_transformers() -> None:
    """The same for transformers alone, where diffusers is not needed: it takes seconds to import."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
