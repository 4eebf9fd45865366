"""Qwen-Image-2.1: Qwen3-VL for the caption and the pictures beside it, and a VAE of factor 16 with 64 channels, whose
pictures have transparency. One model makes pictures from text and from up to ten references.

Sources: `QwenImage21Pipeline` in diffusers 0.42. `encode_prompt` writes the pictures and the caption into its template,
cuts off the rows of the system's message, and takes what the last layer returns, without the norm behind it. Its
`__call__` scales each picture once, to about 1024² pixels, for both the text encoder and the VAE, and cuts no caption;
here, one of more than `max_length` tokens is, pictures not counted. " " stands for an empty prompt. The authors sample
without guidance, so without a negative prompt (QwenLM/Qwen-Image-2.1, README).

`QwenImage21Transformer2DModel` puts the latents of each reference in place of what the text encoder returns for it,
four tokens for one, and the noise behind all. So rows lack what is replaced: `pictures` is 1 for a token that a picture
comes before. A token of latents is one cell. Text and references have no noise, and do not attend to what is behind
them, except within a picture.

The transformer has one layout for a batch, and the position of a picture is that behind its text, padding included. So
the texts of each length have a call of their own.

B samples, G of them with texts of one length, L text tokens, N tokens of pictures, C D channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prep.errors import ModelError
from prep.geometry import Placement, Size
from prep.models.configs import Configs
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import qwenimage_edit
from prep.models.family import (
    ATTENTION_MASK,
    PICTURES,
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    References,
    SamplePipeline,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
    Vision,
)
from prep.models.files import FETCH_AGAIN
from prep.models.lora.kohya import Kohya, Rule, fused
from prep.models.text.places import PLACE, without_places

if TYPE_CHECKING:
    from torch import Tensor

SYSTEM = "Comprehend and analyze the provided prompt."
START = "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n"
PICTURE, BETWEEN = "<image{}><|vision_start|><|image_pad|><|vision_end|>", " "
EMPTY = " "
MOST = 10  # references, by the README
SIDE = 1024  # of the square that references are scaled to: `output_resolution`
SLOT = 4  # latent cells that stand for one token of the text encoder: 2 × 2
FACTOR = 16  # pixels per latent cell and side
# Most tokens that the text encoder makes of a picture: a square of `SIDE` pixels has 1024, others some more.
PICTURE_TOKENS = 1088


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] and `pictures` [token]."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "text_config", "hidden_size")),
            PICTURES: (options.max_length,)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """The arrays of each caption, without pictures and without padding."""
    return _rows(pipeline, captions, None, pipeline._drop_idx + options.max_length, device)


def encode_seen(pipeline: Any, caption: str | None, pictures: Sequence[Any], options: TextOptions,
                device: Any) -> TextRow:
    """The arrays of a caption with pictures, without those of the pictures themselves, and without padding."""
    labels = BETWEEN.join(PICTURE.format(number) for number in range(1, len(pictures) + 1)).replace(PLACE, "")
    beside = len(pipeline.processor.tokenizer(labels)["input_ids"])
    room = pipeline._drop_idx + beside + options.max_length
    return _rows(pipeline, [EMPTY if caption is None else caption], pictures, room, device)[0]


def _rows(pipeline: Any, captions: Sequence[str], pictures: Sequence[Any] | None, room: int,
          device: Any) -> Sequence[TextRow]:
    """The rows of captions, or of one with pictures, whose tokens take none of the `room`. Raises `ModelError`."""
    pipeline.processor.room, pipeline.processor.scales = room, False
    hidden_BLD, mask_BL, seen_BL = pipeline.encode_prompt(
        list(map(without_places, captions)), image=None if pictures is None else list(pictures), device=device)
    slots = sum(picture.shape[0] * picture.shape[1] for picture in pictures or ()) // (SLOT * FACTOR**2)
    if (found := int(seen_BL.sum())) != slots:
        raise ModelError(f"the model's processor makes {found} tokens of pictures that take {SLOT * slots} of the "
                         f"transformer, expected {slots}, one for {SLOT}", hint=FETCH_AGAIN)
    rows = []
    for number, (hidden_LD, seen_L) in enumerate(zip(hidden_BLD, seen_BL, strict=True)):
        length = len(seen_L) if mask_BL is None else int(mask_BL[number].sum())
        words_L, behind_L = ~seen_L[:length], hidden_LD.new_zeros(length)
        behind_L[1:] = (seen_L[:length - 1] & words_L[1:]).to(behind_L.dtype)
        rows.append({"hidden": hidden_LD[:length][words_L], PICTURES: behind_L[words_L]})
    return rows


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The encoding of " "."""
    return encode(pipeline, [EMPTY], options, device)[0]


# ---- references ------------------------------------------------------------------------------------------------------


def place(size: Size, side: int) -> Placement | None:
    """Stretched to `calculate_dimensions` of the pipeline; `None` also if transformers refuses its shape."""
    placed = qwenimage_edit.place(size, side)
    narrow = placed is not None and max(placed.bucket) > qwenimage_edit.LONGEST * min(placed.bucket)
    return None if narrow else placed


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The transformer's arguments with references, before the noise, in the places that `encoder_hidden_states_mask` is
    false for: those of the tokens which they come before.

    All samples have the same places. What the text encoder returned for pictures is replaced, so zeros are given.
    """
    if not references:
        return given
    places = [number for number, kept in enumerate(given["encoder_hidden_states_mask"][0].tolist()) if not kept]
    cells = [(1, *latent.shape[-2:]) for latent in references]
    slots = [height * width // SLOT for _, height, width in cells]
    hidden_BLD, noise_mask_BN = given["encoder_hidden_states"], given["img_mask"]
    count, length, width = hidden_BLD.shape
    longer_BLD = hidden_BLD.new_zeros((count, length + sum(slots), width))
    mask_BL = noise_mask_BN.new_zeros((count, noise_mask_BN.shape[1] + sum(slots)))
    first = begin = 0
    for end, more in zip(places, slots, strict=True):
        longer_BLD[:, first:first + end - begin] = hidden_BLD[:, begin:end]
        first += end - begin
        mask_BL[:, first:first + more] = True
        first, begin = first + more, end
    longer_BLD[:, first:] = hidden_BLD[:, begin:]
    mask_BL[:, length + sum(slots):] = True
    latents = [pack(latent) for latent in references]
    return {**given, "hidden_states": packing.joined(latents[0], [*latents[1:], given["hidden_states"]]),
            "img_shapes": [[*cells, *shapes] for shapes in given["img_shapes"]], "img_mask": mask_BL,
            "encoder_hidden_states": longer_BLD, "encoder_hidden_states_mask": None}


def pack(latent_BChw: Tensor) -> Tensor:
    """[B, N, C]: cells row by row."""
    return latent_BChw.flatten(2).transpose(1, 2)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity. It multiplies sigma by 1000 itself. A picture has one frame."""
    height, width = noised_BChw.shape[-2:]
    text = conditions.text

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        count, length = hidden_GLD.shape[:2]
        mask_GN = text[ATTENTION_MASK].bool().new_zeros((count, length + height * width // SLOT))
        mask_GN[:, length:] = True
        given = append({"hidden_states": pack(noised_BChw[numbers]), "img_shapes": [[(1, height, width)]] * count,
                        "img_mask": mask_GN, "encoder_hidden_states": hidden_GLD,
                        "encoder_hidden_states_mask": text[PICTURES][numbers, :length] == 0},
                       [reference[numbers] for reference in conditions.references])
        whole_GND = transformer(**{**given, "encoder_hidden_states_mask": None}, timestep=sigma_B[numbers],
                                return_dict=False)[0]
        return _unpacked(whole_GND[:, -height * width:], (width, height))

    return padding.by_length(conditions.text, "hidden", answer)


def _unpacked(packed_BNC: Tensor, cells: Size) -> Tensor:
    """[B, C, h, w] of packed latents; `cells` is (w, h)."""
    return packed_BNC.transpose(1, 2).reshape(len(packed_BNC), -1, cells[1], cells[0])


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `QwenImage21Pipeline.__call__`, which guides by a scale above 1 alone. Its masks of embeddings say
    where pictures are, for `append`: the pipeline hands them on, and drops those of no picture."""
    given = {"latents": pack(prompted.latent_1Chw), "true_cfg_scale": prompted.guidance}
    for prefix, text in (("", prompted.positive), *([("negative_", prompted.negative)] * (prompted.guidance > 1))):
        given[f"{prefix}prompt_embeds"], _ = padding.cut(text, "hidden")
        given[f"{prefix}prompt_embeds_mask"] = padding.cut(text, PICTURES)[0] == 0
    return given


def unpack(model: Any, packed_1NC: Tensor, size: Size) -> Tensor:
    """Latents [1, C, h, w] of those of the pipeline."""
    return _unpacked(packed_1NC, (size[0] // FACTOR, size[1] // FACTOR))


class NoProcessor:
    """Stands for the processor, with which the pipeline's constructor counts tokens of texts: here it encodes none."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """No tokens."""
        return [[]]


SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler=EULER, solvers=BY_SIGMAS, guidance=1.0,
                          parts={"processor": NoProcessor()})


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers; no modulation, which all blocks share, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
}
# The names of ComfyUI's checkpoint, which fuses two layers: `convert_qwen_image21_transformer_checkpoint_to_diffusers`
# reads it. ComfyUI also reads diffusers' names (comfy/lora.py), of these two as halves of its layer; a fork of
# musubi-tuner (networks/lora_qwen_image21.py) writes and reads kohya's. diffusers takes the fused layer for another.
KOHYA = Kohya(module="networks.lora_qwen_image21", imported=False, rules=(
    *fused(r"transformer_blocks\.(\d+)", "img_mlp.gate_layer img_mlp.proj", "transformer_blocks.{}.img_mlp.gate_up"),
    Rule(layer=".+", name=""),
))
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA)


# ---- the family ------------------------------------------------------------------------------------------------------

FAMILY = Family(
    name="qwenimage21", models=("Qwen-Image-2.1",), pipelines=("QwenImage21Pipeline",), denoiser="transformer",
    components={
        "text_encoder": (("transformers", "Qwen3VLForConditionalGeneration"),),
        "processor": (("transformers", "Qwen3VLProcessor"),),
        "transformer": (("diffusers", "QwenImage21Transformer2DModel"),),
        "vae": (("diffusers", "AutoencoderKLQwenImage21"),),
    },
    latent_channels=64, factor=FACTOR, patch=2, token=1, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    keeps_alpha=True,
    predictions=("flow",), predict=predict, by_length="always", sampling=SAMPLING, lora=LORA,
    references=References(most=MOST, resolution=SIDE, place=place, append=append, leading=True),
    text=TextEncoding(arrays={"hidden": ("token", "channel"), PICTURES: ("token",)}, layout="trimmed", max_length=1024,
                      longest=2048, shapes=shapes, encode=encode, without_prompt=without_prompt,
                      vision=Vision(place=lambda _, placed: placed, encode=encode_seen, tokens=PICTURE_TOKENS),
                      constants={"start": START, "end": END, "picture": PICTURE, "between": BETWEEN, "empty": EMPTY}),
    labels=Labels(architecture="qwen-image-2.1"),
    config_widths={"in_channels": ("latent", 1), "context_in_dim": ("hidden", 1)},
)
