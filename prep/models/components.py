"""The classes that pipeline components may be loaded as. No others: a model directory can name any Python class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.parse import brief

Class = tuple[str, str]  # library and class, as model_index.json names them

# Text encoders and tokenizers: those of the pipelines of Stable Diffusion 1 to 3, SDXL, PixArt and FLUX.1.
CLASSES: Mapping[str, frozenset[Class]] = {
    "text_encoder": frozenset({("transformers", "CLIPTextModel"), ("transformers", "CLIPTextModelWithProjection"),
                               ("transformers", "T5EncoderModel")}),
    "tokenizer": frozenset({("transformers", "CLIPTokenizer"), ("transformers", "CLIPTokenizerFast"),
                            ("transformers", "T5Tokenizer"), ("transformers", "T5TokenizerFast")}),
    "unet": frozenset({("diffusers", "UNet2DConditionModel")}),
    "vae": frozenset({("diffusers", "AutoencoderKL")}),
}
_NUMBERED = re.compile(r"(text_encoder|tokenizer)(?:_[2-9])?")  # text_encoder, text_encoder_2, text_encoder_3


def class_of(index: Mapping[str, Any], name: str, model: Path) -> Class:
    """The class of the component `name`, from `index`, the model_index.json of `model`.

    Raises `ModelError` if it is not in `CLASSES`.
    """
    named, numbered = index.get(name), _NUMBERED.fullmatch(name)
    known = CLASSES[numbered[1] if numbered else name]
    if isinstance(named, list) and len(named) == 2 and all(isinstance(part, str) for part in named):
        library, kind = named
        if (library, kind) in known:
            return library, kind
    raise ModelError(f"{name} in {model / 'model_index.json'} is {brief(named)}, expected "
                     f"{' or '.join(sorted(f'{kind} of {library}' for library, kind in known))}",
                     hint="only these classes are loaded; code in a model directory is never run")


def numbered(index: Mapping[str, Any], stem: str) -> list[str]:
    """The pipeline's components named `stem`, `stem`_2 and so on, in this order; always includes `stem`."""
    return [stem, *sorted(name for name, named in index.items()
                          if name != stem and (found := _NUMBERED.fullmatch(name)) and found[1] == stem
                          and named not in (None, [None, None]))]
