"""Silences what diffusers and transformers print of their own accord; what matters of it is a check of ours.

To be called before `prep.models.vae` and `prep.models.text_encoder` are imported: some notices come with the import.
"""

from __future__ import annotations

import logging


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
