"""LongCat-Image: Qwen2.5-VL for the tokens of a caption, of quoted text one by one, and FLUX.1's VAE.

Sources: `LongCatImagePipeline` in diffusers 0.42. `_encode_prompt` cuts a caption at its quotation marks, and gives the
tokenizer what is quoted character by character. The tokens, at most 512, are padded to 512, and the template is put
around the padding; a row is of the 512 between. Nothing masks padding in the transformer, and tokens are numbered, so a
row has all of them. Those of pictures count from 512 on, with 1 on the first axis. The VAE's factors are FLUX.1's; the
transformer takes patches of 2 × 2 latent cells.

`encode` does what `_encode_prompt` does, but for two things. Of a caption with two words like "don't" and "it's" that
puts one in place of the other, and chance says which: here each stays what it is. What the encoder's head would say is
not computed. Padding has positions of its own in the encoder, as transformers 5 gives them; 4.57 gave all of it 1.

`__call__` has the text encoder rewrite prompts unless `enable_prompt_rewrite` is off; captions are encoded as they are.

The transformer is FLUX.1's without pooled text and guidance.

B samples, L text tokens, D channels, h w latent cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.denoiser import packing
from prep.models.denoiser.samplers import BY_SIGMAS
from prep.models.families import flux, ovis, qwenimage
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    TextEncoding,
    TextOptions,
    TextRow,
)

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = ("<|im_start|>system\nAs an image captioning expert, generate a descriptive text prompt based on an image "
          "content, suitable for input to a text-to-image model.<|im_end|>\n<|im_start|>user\n")
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
LENGTH = 512  # `tokenizer_max_length`
# What is quoted, of `split_quotation`; an apostrophe between two letters is no quotation mark.
QUOTED = re.compile("'[^']*'|\"[^\"]*\"|‘[^‘’]*’|“[^“”]*”")
APOSTROPHE = re.compile(r"([a-zA-Z]+)'([a-zA-Z]+)")


def pieces(caption: str) -> Sequence[str]:
    """The parts of a caption that the tokenizer is given one by one: those between quoted ones, and each character of
    those. Together they are the caption."""
    unmarked, found, begin = APOSTROPHE.sub(r"\1_\2", caption), list[str](), 0
    for match in (*QUOTED.finditer(unmarked), None):
        start, end = (len(caption), len(caption)) if match is None else match.span()
        for part in (caption[begin:start], caption[start:end]):
            # As the pipeline, which looks again: a mark without its other half may find an apostrophe.
            found += part if QUOTED.match(part) else [part] * bool(part)
        begin = end
    return found


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, padding included."""
    return encode_behind(PREFIX, pipeline, captions, options, device)


def encode_behind(prefix: str, pipeline: Any, captions: Sequence[str], options: TextOptions,
                  device: Any) -> Sequence[TextRow]:
    """The same with any start of the template."""
    before = numbers(pipeline.tokenizer, prefix)
    read = around(pipeline.tokenizer, before, captions, options).to(device)
    ids_BL = read["input_ids"]
    return rows(pipeline, len(before), **read,
                position_ids=ids_BL.new_tensor(range(ids_BL.shape[1])).expand_as(ids_BL))


def around(tokenizer: Any, before: Sequence[int], captions: Sequence[str], options: TextOptions) -> Any:
    """Token ids and mask [B, L] of captions and their padding, in a template that starts with the tokens `before`."""
    after = numbers(tokenizer, SUFFIX)
    padded = tokenizer.pad({"input_ids": [tokens(tokenizer, caption)[:options.max_length] for caption in captions]},
                           max_length=options.max_length, padding="max_length", return_attention_mask=True)
    return tokenizer.pad({
        "input_ids": [[*before, *ids, *after] for ids in padded["input_ids"]],
        "attention_mask": [[1] * len(before) + mask + [1] * len(after) for mask in padded["attention_mask"]],
    }, return_tensors="pt")


def rows(pipeline: Any, first: int, **given: Any) -> Sequence[TextRow]:
    """One `hidden` for each text that the encoder is given, from its token `first` to the end of the template."""
    hidden_BLD = pipeline.text_encoder(**given, output_hidden_states=True, use_cache=False,
                                       logits_to_keep=1).hidden_states[-1]
    return [{"hidden": hidden_LD} for hidden_LD in hidden_BLD[:, first:-len(numbers(pipeline.tokenizer, SUFFIX))]]


def tokens(tokenizer: Any, caption: str) -> list[int]:
    """The numbers of a caption's tokens."""
    return [number for part in pieces(caption) for number in numbers(tokenizer, part)]


def numbers(tokenizer: Any, text: str) -> list[int]:
    """The numbers of a text's tokens, without start and end."""
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="full", max_length=LENGTH, shortest=LENGTH,
                    longest=LENGTH, shapes=qwenimage.shapes, encode=encode, pieces=pieces,
                    constants={"prefix": PREFIX, "suffix": SUFFIX, "quoted": QUOTED.pattern})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    hidden_BLD = conditions.text["hidden"]
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B, encoder_hidden_states=hidden_BLD,
        txt_ids=ovis.numbers(hidden_BLD), img_ids=positions(noised_BChw, hidden_BLD.shape[1]), return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def positions(latent_BChw: Tensor, first: int, kind: int = 1) -> Tensor:
    """[N, 3] float32: `kind`, and row and column of each patch, which count from `first`."""
    found = packing.positions(latent_BChw)
    found[:, 0] = kind
    found[:, 1:] += first
    return found


def prepare(pipeline: Any, prompted: Prompted) -> None:
    """Has the pipeline take the row of the prompt: it fails where it is given one, for it counts texts all the same."""
    pipeline._encode_prompt = lambda _: prompted.positive["hidden"]


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `LongCatImagePipeline.__call__`; for the prompt itself see `prepare`."""
    return {"prompt": "", "negative_prompt_embeds": prompted.negative["hidden"], "enable_prompt_rewrite": False,
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


# It gives every scheduler sigmas. The guidance is its default.
SAMPLING = replace(flux.SAMPLING, call=call, prepare=prepare, solvers=BY_SIGMAS, guidance=4.5)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

LORA = LoraLayers(presets=flux.PRESETS, kohya=None, in_diffusers=False)  # layers are named as FLUX.1's


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": qwenimage.COMPONENTS["text_encoder"],
    "tokenizer": qwenimage.COMPONENTS["tokenizer"],
    "transformer": (("diffusers", "LongCatImageTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="longcat_image", models=("LongCat-Image", "LongCat-Image-Dev"), pipelines=("LongCatImagePipeline",),
    denoiser="transformer", components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="0.3611", shift_factor="0.1159", predictions=("flow",), text=TEXT,
    predict=predict, chooses_attention=True, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="longcat-image"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
