"""Single files in their authors' names, in ComfyUI's and in diffusers': each weight arrives as it was, or is named."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import fp8_weights
import original_layout
import pytest
import torch
from model_files import change_json
from original_checkpoints import write_original
from original_layout import published
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")

import tiny_pipelines

from prep.errors import ModelError
from prep.models.checkpoints.original import fit, ways_of_diffusers
from prep.models.checkpoints.single_file import Converted
from prep.models.checkpoints.single_file import convert as convert_model
from prep.models.families.registry import FAMILIES
from prep.models.pipeline import infer_family, open_single

# Authors' names, if they are others than diffusers'. FLUX.1, Chroma, Lumina 2 and SANA have converters for their
# published width alone.
PUBLISHED = {"sd3": original_layout.SD3, "flux2": original_layout.FLUX2, "zimage": original_layout.ZIMAGE,
             "auraflow": original_layout.AURAFLOW, "krea2": original_layout.KREA2,
             "qwenimage21": original_layout.QWENIMAGE21, "flux3": original_layout.FLUX3,
             "anima": original_layout.ANIMA}
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
STEM = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module", params=tiny_pipelines.FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return tiny_pipelines.save(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def sd3(tmp_path_factory) -> Path:
    return tiny_pipelines.save("sd3", tmp_path_factory.mktemp("sd3") / "model")


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory) -> Path:
    return tiny_pipelines.save("sdxl", tmp_path_factory.mktemp("sdxl") / "model", second_width=48)


def convert(file: Path, config: Path, out: Path) -> Converted:
    return convert_model(open_single(file, config), out)


def denoiser(model: Path) -> Path:
    return model / FAMILIES[infer_family(model)].denoiser / STEM


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same tensors, in the same dtypes."""
    a, b = ({name.removeprefix("text_model."): value for name, value in load_file(path).items()}
            for path in (one, other))
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(
        a[name].view(torch.uint8) if a[name].ndim else a[name], b[name].view(torch.uint8) if b[name].ndim else b[name])
        for name in a)


def test_a_denoiser_alone_in_every_spelling_and_dtype(model, tmp_path):
    """A prefix does not matter; each tensor keeps the dtype it has, fp8 without scales, too."""
    kinds = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    ours = {name: value.to(kinds[number % 3 if value.ndim == 2 else 1])
            for number, (name, value) in enumerate(load_file(denoiser(model)).items())}
    save_file(ours, tmp_path / "ours.safetensors")
    prefix = PREFIXES[len(ours) % 3]
    save_file({prefix + name: value for name, value in ours.items()}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", model, tmp_path / "out")
    assert same(denoiser(tmp_path / "out"), tmp_path / "ours.safetensors")
    assert same(tmp_path / "out" / "vae" / STEM, model / "vae" / STEM), "what the file lacks is copied"


@pytest.mark.parametrize(("prefix", "family"), [  # each family with one of the prefixes
    pytest.param(prefix, family, marks=[pytest.mark.slow] * ((one - other) % len(PREFIXES) != 0))
    for other, prefix in enumerate(PREFIXES) for one, family in enumerate(PUBLISHED)])
def test_authors_names(family, prefix, tmp_path):
    model = tiny_pipelines.save(family, tmp_path / "model")
    weights = published(load_file(denoiser(model)), PUBLISHED[family])
    kinds = {"": torch.float32, "model.diffusion_model.": torch.float8_e4m3fn, "diffusion_model.": torch.bfloat16}
    weights = {name: value.to(kinds[prefix]) for name, value in weights.items()}
    save_file({name: value.to(kinds[prefix]) for name, value in load_file(denoiser(model)).items()}, denoiser(model))
    save_file({prefix + name: value.contiguous() for name, value in weights.items()}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", model, tmp_path / "out")
    assert same(denoiser(tmp_path / "out"), denoiser(model))


WIDTH = 3072  # which diffusers' converters of FLUX.1 and Chroma take for granted
FLUX = {
    "img_in.weight": (WIDTH, 64), "img_in.bias": (WIDTH,), "txt_in.weight": (WIDTH, 32), "txt_in.bias": (WIDTH,),
    **{f"{name}.{layer}": shape for name, first in (("time_in", 256), ("vector_in", 16), ("guidance_in", 256))
       for layer, shape in (("in_layer.weight", (WIDTH, first)), ("in_layer.bias", (WIDTH,)),
                            ("out_layer.weight", (WIDTH, WIDTH)), ("out_layer.bias", (WIDTH,)))},
    **{f"double_blocks.0.{side}_{name}": shape for side in ("img", "txt") for name, shape in (
        ("mod.lin.weight", (6 * WIDTH, WIDTH)), ("mod.lin.bias", (6 * WIDTH,)), ("attn.qkv.weight", (3 * WIDTH, WIDTH)),
        ("attn.qkv.bias", (3 * WIDTH,)), ("attn.norm.query_norm.scale", (128,)), ("attn.norm.key_norm.scale", (128,)),
        ("attn.proj.weight", (WIDTH, WIDTH)), ("attn.proj.bias", (WIDTH,)), ("mlp.0.weight", (4 * WIDTH, WIDTH)),
        ("mlp.0.bias", (4 * WIDTH,)), ("mlp.2.weight", (WIDTH, 4 * WIDTH)), ("mlp.2.bias", (WIDTH,)))},
    **{f"single_blocks.0.{name}": shape for name, shape in (
        ("linear1.weight", (7 * WIDTH, WIDTH)), ("linear1.bias", (7 * WIDTH,)), ("linear2.weight", (WIDTH, 5 * WIDTH)),
        ("linear2.bias", (WIDTH,)), ("norm.query_norm.scale", (128,)), ("norm.key_norm.scale", (128,)),
        ("modulation.lin.weight", (3 * WIDTH, WIDTH)), ("modulation.lin.bias", (3 * WIDTH,)))},
    "final_layer.linear.weight": (64, WIDTH), "final_layer.linear.bias": (64,),
    "final_layer.adaLN_modulation.1.weight": (2 * WIDTH, WIDTH), "final_layer.adaLN_modulation.1.bias": (2 * WIDTH,),
}


@pytest.mark.parametrize("odd", ["", "double_blocks.0.img_attn.odd.weight", "odd"])
def test_flux_at_its_width_without_any_data(odd):
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, joint_attention_dim=32,
                                       pooled_projection_dim=16, guidance_embeds=True)
        names = {**FLUX, **({odd: (3,)} if odd else {})}
        given = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in names.items()}
    _, way = ways_of_diffusers(FluxTransformer2DModel, model.config, {name: f"there.{name}" for name in names})
    found = fit(given, way, model)
    assert not found.missing and not found.misshapen and found.unread == ((f"there.{odd}",) if odd else ())
    assert {dtype for dtype, _ in found.layout.values()} == {torch.bfloat16}
    assert sum(math.prod(shape) for _, shape in found.layout.values()) == sum(map(math.prod, FLUX.values()))


def in_one_file(model: Path, path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of SD3 as ComfyUI saves it: T5's table once, tokenizer and scales of logits beside it."""
    sd15 = tiny_pipelines.save("sd15", path.parent / "sd15")
    shutil.copytree(model / "vae", sd15 / "vae", dirs_exist_ok=True)
    vae = load_file(write_original(sd15, path.parent / "sd15.safetensors"))
    found = {f"model.diffusion_model.{name}": value
             for name, value in published(load_file(denoiser(model)), original_layout.SD3).items()}
    found |= {name: value for name, value in vae.items() if name.startswith("first_stage_model.")}
    for part, folder in (("clip_l", "text_encoder"), ("clip_g", "text_encoder_2"), ("t5xxl", "text_encoder_3")):
        found |= {f"text_encoders.{part}.transformer.{name}": value
                  for name, value in load_file(model / folder / "model.safetensors").items()
                  if not name.endswith("embed_tokens.weight")}
        found[f"text_encoders.{part}.logit_scale"] = torch.ones(())
    found["text_encoders.t5xxl.transformer.spiece_model"] = torch.zeros(9, dtype=torch.uint8)
    save_file({name: value.contiguous() for name, value in found.items()}, path)
    return found


def test_a_checkpoint_of_comfyui_with_t5_s_table_once(sd3, tmp_path):
    in_one_file(sd3, tmp_path / "x.safetensors")
    bare = shutil.copytree(sd3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    convert(tmp_path / "x.safetensors", bare, tmp_path / "out")
    for name in ("transformer/" + STEM, "vae/" + STEM, "text_encoder_2/model.safetensors"):
        assert same(tmp_path / "out" / name, sd3 / name), name
    first = load_file(tmp_path / "out" / "text_encoder" / "model.safetensors")
    projection = first["text_projection.weight"]
    assert torch.equal(projection, torch.eye(len(projection))), "SD3 takes the vector of CLIP-L as it is"
    t5 = load_file(tmp_path / "out" / "text_encoder_3" / "model.safetensors")
    assert "shared.weight" in t5 and "encoder.embed_tokens.weight" not in t5
    from prep.models.fingerprint import text_files
    from prep.models.text.pipeline import load_encoder

    loaded = load_encoder(tmp_path / "out", FAMILIES["sd3"], "text_encoder_3", text_files(tmp_path / "out"),
                          torch.float32)
    assert torch.equal(loaded.get_input_embeddings().weight, t5["shared.weight"])


def test_what_nothing_reads_is_named(sdxl, tmp_path):
    """Of the denoiser, of a text encoder, and of no component; not what is known to change nothing."""
    file = write_original(sdxl, tmp_path / "x.safetensors")
    whole = load_file(file)
    known = ("model_ema.decay", "alphas_cumprod", "denoiser.sigmas", "sqrt_recip_alphas_cumprod", "posterior_variance",
             "conditioner.embedders.1.model.logit_scale",
             "conditioner.embedders.0.transformer.text_model.embeddings.position_ids")
    save_file({**whole, **{name: torch.ones(3) for name in known}}, file)
    convert(file, sdxl, tmp_path / "out")
    for odd in ("model.diffusion_model.input_blocks.1.1.odd.weight", "edm_mean", "first_stage_model.encoder.odd.bias",
                "conditioner.embedders.1.model.transformer.resblocks.0.attn.odd.weight"):
        save_file({**whole, odd: torch.ones(3)}, file)
        with pytest.raises(ModelError) as error:
            convert(file, sdxl, tmp_path / "out-2")
        assert error.value.message.startswith(f"{file} has tensors that nothing reads: "), odd
        assert odd in error.value.message and not (tmp_path / "out-2").exists()


def test_weights_with_scales_become_what_they_mean(sdxl, tmp_path):
    file = write_original(sdxl, tmp_path / "x.safetensors")
    given, _ = fp8_weights.scaled(load_file(file), only="diffusion_model")
    save_file({**given, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, file)
    done = convert(file, sdxl, tmp_path / "out")
    before, after = load_file(denoiser(sdxl)), load_file(denoiser(tmp_path / "out"))
    assert done.scaled == sum(name.endswith("scale_weight") for name in given) > 10
    for name, value in before.items():
        plain = value.ndim != 2 or not name.endswith(".weight") or "embed" in name
        assert plain or after[name].dtype in (torch.bfloat16, torch.float32)
        torch.testing.assert_close(after[name].float(), value, rtol=0.08, atol=0.01 * float(value.abs().max()))


@pytest.mark.parametrize(("number", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.float16),
                                               (float("nan"), torch.float8_e4m3fn), (-float("inf"), torch.bfloat16)])
def test_weights_that_are_not_finite_are_refused(sdxl, tmp_path, number, dtype):
    file = write_original(sdxl, tmp_path / "x.safetensors")
    whole = load_file(file)
    name = next(name for name in whole if name.endswith("attn1.to_q.weight"))
    whole[name][0, 0] = number
    whole[name] = whole[name].to(dtype)
    save_file(whole, file)
    with pytest.raises(ModelError, match=r"weights of the unet are not finite, NaN or infinite: .*attn1\.to_q"):
        convert(file, sdxl, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_marks_are_compared_with_the_scheduler(sdxl, tmp_path):
    """NoobAI and others say in their files that they predict v."""
    file = write_original(sdxl, tmp_path / "x.safetensors")
    save_file({**load_file(file), "v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, file)
    config = shutil.copytree(sdxl, tmp_path / "config")
    for key, value in (("prediction_type", "v_prediction"), ("rescale_betas_zero_snr", True)):
        with pytest.raises(ModelError, match=rf"says of itself that {key} is .*, but the scheduler's config in .* has"):
            convert(file, config, tmp_path / "out")
        change_json(config / "scheduler" / "scheduler_config.json", **{key: value})
    convert(file, config, tmp_path / "out")


def test_a_file_of_another_architecture(sd3, sdxl, tmp_path):
    file = write_original(sdxl, tmp_path / "x.safetensors")
    with pytest.raises(ModelError) as error:
        convert(file, sd3, tmp_path / "out")
    assert error.value.message == f"{file} is of family 'sdxl', but {sd3} is of family 'sd3'"
    assert error.value.hint.startswith("name where its configs and tokenizers are, after an @: ")
    other = shutil.copytree(sdxl, tmp_path / "other")
    change_json(other / "text_encoder_2" / "config.json", intermediate_size=36)
    with pytest.raises(ModelError, match="has weights of the text encoder 2 whose shapes are not those of "):
        convert(file, other, tmp_path / "out")


def test_configs_that_cannot_be_built(sdxl, tmp_path):
    file = write_original(sdxl, tmp_path / "x.safetensors")
    for changes, said in (({"cross_attention_dim": 2**25}, "describes a model far larger than what "),
                          ({"down_block_types": ["Odd"]}, "cannot be used: ")):
        config = shutil.copytree(sdxl, tmp_path / said[:9])
        change_json(config / "unet" / "config.json", **changes)
        with pytest.raises(ModelError) as error:
            convert(file, config, tmp_path / "out")
        assert error.value.message.startswith(f"{config / 'unet' / 'config.json'} {said}")
