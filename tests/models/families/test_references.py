"""Pictures as conditions: their sizes, and whatever else of them can be told without a cache."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import (
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxTransformer2DModel,
    LongCatImageEditPipeline,
    LongCatImageTransformer2DModel,
    ModularPipeline,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.flux import pipeline_flux_kontext
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from prep.geometry import Placement, Size
from prep.images.decode import scale_and_crop
from prep.models.device.hollow import META, Hollow
from prep.models.families import flux_kontext
from prep.models.families.registry import FAMILIES
from prep.models.family import Conditions

STRETCHING = ("flux_kontext", "qwenimage_edit", "qwenimage21", "longcat_image_edit")
TAKING = [name for name, family in FAMILIES.items() if family.references]


class Seen(Exception):
    """What a pipeline makes of a picture before it is pixels."""


class Blank(Image.Image):
    """A picture that has a size and no pixels."""

    scaled: ClassVar[list[Size]] = []  # since the pipeline was called

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._size = size

    def convert(self, *_: Any, **__: Any) -> Any:
        return self

    def resize(self, size: Size, *_: Any, **__: Any) -> Blank:
        Blank.scaled.append(size)
        return Blank(size)

    def crop(self, box: tuple[int, int, int, int]) -> Any:
        raise Seen(self.size, box)

    def tobytes(self, *_: Any, **__: Any) -> Any:
        raise Seen(self.size, (0, 0, *self.size))


def placed(pipeline: Any, embeddings: dict[str, torch.Tensor], size: Size) -> Placement | None:
    """How the pipeline's own code places a picture; `None` if it refuses it."""
    Blank.scaled.clear()
    try:
        pipeline(image=beside(pipeline, Blank(size)), **embeddings)
    except Seen as seen:
        scaled, (left, top, right, bottom) = seen.args
        return Placement(scaled=scaled, crop=(left, top), bucket=(right - left, bottom - top))
    except ValueError as error:
        assert "Image too small" in str(error) or "Aspect ratio too extreme" in str(error)
        return None
    raise AssertionError("the pipeline made a picture")


def beside(pipeline: Any, picture: Image.Image) -> Any:
    """A picture as pipelines take one; FLUX.3's fills one picture alone up to whole tokens, and crops each of several.
    """
    return [picture, picture] if isinstance(pipeline, ModularPipeline) else picture


def embeddings(pipeline: Any) -> dict[str, Any]:
    """Arguments of a pipeline, beside a picture."""
    config, size = pipeline.transformer.config, {"height": 64, "width": 64}
    if isinstance(pipeline, ModularPipeline):
        del pipeline._blocks.sub_blocks["text_encoder"]
        return {f"{prefix}prompt_embeds": torch.zeros(1, 4, config.joint_attention_dim)
                for prefix in ("", "negative_")} | size
    if isinstance(pipeline, LongCatImageEditPipeline):
        return {"prompt": "a caption"}  # its pictures have the size of what is changed
    if "context_in_dim" in config:
        return {"prompt": "a caption", **size}  # its embeddings would have to be of the picture
    found = {"prompt_embeds": torch.zeros(1, 4, config.joint_attention_dim), "guidance_scale": 1.0, **size}
    pooled = config.get("pooled_projection_dim")
    return found | ({"pooled_prompt_embeds": torch.zeros(1, pooled)} if pooled else {})


@pytest.mark.parametrize("name", TAKING)
def test_pictures_are_placed_as_the_pipeline_places_them(name):
    family, pipeline = FAMILIES[name], tiny_pipelines.build(name)
    texts = embeddings(pipeline)

    sides = st.integers(16, 9000)

    @given(st.tuples(sides, sides) | st.tuples(sides, st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] * pair[1]))
           | sides.map(lambda side: (side, side)))
    @example((1040, 1040))  # its floats make 1023 pixels of them
    @example((1024, 1024))
    @example((64, 512))
    @example((513, 64))
    @example((63, 64))
    def all_sizes(size: Size) -> None:
        wanted = placed(pipeline, texts, size)
        if family.text.vision is not None:
            own = family.references.place(size, family.references.resolution)
            as_seen = None if own is None else family.text.vision.place(size, own)
            assert as_seen is None or as_seen.scaled == Blank.scaled[0]
            shown = Blank.scaled[1] if name == "longcat_image_edit" else Blank.scaled[0]  # half of the other
            try:
                smart_resize(*shown[::-1])
            except (ValueError, ZeroDivisionError):
                wanted = None  # the text encoder refuses it
        assert family.references.place(size, family.references.resolution) == wanted

    all_sizes()


@pytest.mark.parametrize("name", TAKING)
def test_the_vae_is_given_the_pipeline_s_pixels(name, monkeypatch):
    """As `prep encode` scales and crops pictures."""
    family, pipeline = FAMILIES[name], tiny_pipelines.build(name)
    texts = embeddings(pipeline)

    def seen(pixels: torch.Tensor) -> Any:
        raise Seen(pixels)

    monkeypatch.setattr(pipeline.vae, "encode", seen)
    for size in ((1400, 1111), (300, 111)):
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
        with pytest.raises(Seen) as caught:
            pipeline(image=beside(pipeline, picture), **texts)
        pixels_CHW = caught.value.args[0].squeeze(2)[0]  # of one frame, for a VAE of video
        given = ((pixels_CHW.permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8).numpy()
        if given.shape[2] == 4:  # with transparency
            assert (given[..., 3] == 255).all()
            given = given[..., :3]
        assert np.array_equal(scale_and_crop(picture, family.references.place(size, family.references.resolution)),
                              given)


@pytest.mark.parametrize("name", TAKING)
@given(st.tuples(st.integers(1, 20000), st.integers(1, 20000)), st.integers(1, 4096))
def test_a_placement_of_any_side_is_of_whole_tokens(name, size, side):
    family = FAMILIES[name]
    token, found = family.factor * family.patch, family.references.place(size, side)
    if found is None:
        return
    for picture, scaled, begin, length in zip(size, found.scaled, found.crop, found.bucket, strict=True):
        assert length > 0 and length % token == 0 and begin >= 0 and begin + length <= scaled
        assert name in STRETCHING or (scaled <= picture and scaled - length < token)
    exact = [side * (picture / other) ** 0.5 for picture, other in zip(size, size[::-1], strict=True)]
    if name == "longcat_image_edit":  # each side is rounded up
        assert all(-0.001 < length - wanted < 16.001 for length, wanted in zip(found.bucket, exact, strict=True))
        return
    area = found.bucket[0] * found.bucket[1]
    if name in ("qwenimage_edit", "qwenimage21"):  # each side is rounded to multiples of 32
        assert all(abs(length - wanted) <= 16.001 for length, wanted in zip(found.bucket, exact, strict=True))
        return
    assert area <= 1.06 * side**2, "of Kontext's sizes the largest has 1.051 times the area of a square"


def test_kontext_s_sizes_are_the_pipeline_s():
    assert list(flux_kontext.SIZES) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS


def test_kontext_is_given_a_latent_as_its_pipeline_gives_it():
    """Which takes latents, too; pictures are in tests/whole/test_families.py."""
    pipeline = tiny_pipelines.build("flux_kontext")
    noise, shown = torch.randn(1, 16, 8, 6), torch.randn(1, 16, 4, 10)
    texts, seen = embeddings(pipeline), []
    for name in ("guidance_scale", "height", "width"):
        del texts[name]
    pipeline.transformer.register_forward_pre_hook(lambda module, args, given: seen.append(given), with_kwargs=True)
    pipeline(image=shown, latents=flux_kontext.packing.pack(noise), height=64, width=48, max_area=64 * 48,
             num_inference_steps=1, output_type="latent", **texts)
    with torch.no_grad():
        answer = flux_kontext.FAMILY.predict(pipeline.transformer, noise, torch.tensor([1.0]), Conditions(
            text={"hidden": texts["prompt_embeds"], "pooled": texts["pooled_prompt_embeds"]},
            sizes_B6=torch.zeros(1, 6), references=[shown]))
    assert answer.shape == noise.shape
    for name in ("hidden_states", "img_ids"):
        assert torch.equal(seen[1][name], seen[0][name]), name


# Of the transformers' published configs what is not the default of its class, but for the number of blocks.
BLOCKS = {"num_layers": 1, "num_single_layers": 1}
PUBLISHED = {
    "qwenimage21": (QwenImage21Transformer2DModel, {}, {"hidden": (512, 4096)}),
    "qwenimage_edit": (QwenImageTransformer2DModel, {}, {"hidden": (512, 3584)}),
    "longcat_image_edit": (LongCatImageTransformer2DModel, {}, {"hidden": (512, 3584)}),
    "flux_kontext": (FluxTransformer2DModel, {"guidance_embeds": True}, {"hidden": (512, 4096), "pooled": (768,)}),
    "flux2": (Flux2Transformer2DModel, {}, {"hidden": (512, 15360)}),
    "flux3": (Flux3Transformer2DModel, {}, {"hidden": (512, 20480)}),
    "flux2_klein": (Flux2Transformer2DModel, {"num_attention_heads": 24, "joint_attention_dim": 7680,
                                              "guidance_embeds": False}, {"hidden": (512, 7680)}),
}


@pytest.mark.parametrize("name", TAKING)
def test_the_memory_of_references_can_be_counted(name):
    """A pass of blocks of the published size in bfloat16, without weights."""
    kind, config, text = PUBLISHED[name]
    family, peaks = FAMILIES[name], []
    with META:
        taken = {option: count for option, count in BLOCKS.items() if option in inspect.signature(kind).parameters}
        model = kind(**config, **taken).to(torch.bfloat16)
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in (model._keep_in_fp32_modules or ()):
            module.float()
    side = 1024 // family.factor  # of references, in cells: twice that of the latent
    with Hollow() as counted:
        counted.enter(model)
        weights = sum(counted.live.values())
        for cells in ([], [(side, side)] * family.references.most):
            counted.reset_peak()
            latent, *references = (counted.empty((2, family.latent_channels, *each), torch.bfloat16)
                                   for each in ((side // 2, side // 2), *cells))
            hidden = {array: counted.empty((2, *shape), torch.bfloat16) for array, shape in text.items()}
            if family.text.layout == "trimmed":
                hidden["attention_mask"] = torch.ones(2, 512, dtype=torch.uint8)
                hidden["pictures"] = (torch.arange(512) < len(references)).expand(2, -1)
            with torch.no_grad():
                made = family.predict(model, latent, torch.tensor([0.5, 0.7]), Conditions(
                    text=hidden, sizes_B6=torch.zeros(2, 6), references=references))
            peaks.append(sum(counted.peak.values()) - weights)
            assert made.shape == latent.shape
    tokens = 512 + 32 * 32
    more = family.references.most * 64 * 64
    assert peaks[1] == pytest.approx(peaks[0] * (tokens + more) / tokens, rel=0.2)
