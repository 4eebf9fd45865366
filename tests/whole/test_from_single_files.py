"""A model in one file is used as its directory is: rows, training, pictures and merges have the same numbers.

Files are written from the tiny pipelines, by tables of names of their own (`original_layout`, `original_checkpoints`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fp8_weights
import gguf_files
import numpy as np
import original_layout
import pytest
import torch
from family_cases import CASES
from original_checkpoints import write_original
from original_layout import published
from pictures import draw, draw_mask
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep import api
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.models.pipeline import open_single, weighted_files
from train.models.base import base_fingerprints

# Their authors' names, if these are others than diffusers' and diffusers converts tiny widths.
NAMES = {"sd3": original_layout.SD3, "flux2": original_layout.FLUX2, "zimage": original_layout.ZIMAGE,
         "auraflow": original_layout.AURAFLOW, "krea2": original_layout.KREA2,
         "qwenimage21": original_layout.QWENIMAGE21, "flux3": original_layout.FLUX3,
         "anima": original_layout.ANIMA}
# Families whose checkpoints have all parts.
WHOLE = {"sd15": {}, "sd15_inpaint": {}, "sd21": {}, "sd21_inpaint": {}, "sdxl": {"second_width": 48}}
STEM = "diffusion_pytorch_model.safetensors"
BUILDS = sorted({case.build for case in CASES if not case.options})


def pictures(root: Path) -> Path:
    for number, caption in enumerate(("a red cat", "two dogs on a bench", "a blue bird")):
        draw(root / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text(caption)
        draw_mask(root / "photos" / f"{number}-masklabel.png", (64, 64))
    return root / "photos"


def denoiser_of(build: str, model: Path) -> Path:
    name = next(case.family for case in CASES if case.build == build)
    return model / FAMILIES[name].denoiser / STEM


def write_file(build: str, model: Path, path: Path) -> Path:
    """The denoiser alone as ComfyUI has it, with its authors' names if the test knows these; of the first families all
    parts."""
    if build in WHOLE:
        return write_original(model, path)
    weights = published(load_file(denoiser_of(build, model)), NAMES.get(build, ""))
    save_file({f"model.diffusion_model.{name}": value.contiguous() for name, value in weights.items()}, path)
    return path


def rows_of(manifest: Path) -> list[dict[str, np.ndarray]]:
    """Every array of each sample's latent and text rows."""
    dataset = api.open_manifest(manifest)
    return [{**dataset.latent(number), **dataset.text(number)} for number in range(len(dataset))]


@pytest.fixture
def scene(tmp_path, prep, train):
    """Encodes and trains by a name of the model; the manifest's rows and the tensors of the LoRA."""
    photos = pictures(tmp_path)

    def go(model: object, name: str, *more: object) -> tuple[Path, dict[str, torch.Tensor]]:
        manifest = tmp_path / f"{name}.json"
        result = prep("encode", photos, "--model", model, "--cache", tmp_path / name, "-o", manifest,
                      "--resolution", 64, "--step", 32, "--dtype", "float32", "--compute", "float32", "--device",
                      "cpu", *more)
        assert result.code == 0, result.err
        result = train("run", manifest, "-o", tmp_path / f"run-{name}", "--steps", 2, "--rank", 2, "--device", "cpu",
                       "--set", "precision=\"fp32\"", "--set", "batch_size=2", "--set", "sample.every=0", "--set",
                       "validation.every=0", "--set", "lora.format=\"diffusers\"")
        assert result.code == 0, result.err
        lora = next((tmp_path / f"run-{name}").glob("*.safetensors"))
        return manifest, load_file(lora)

    return go


@pytest.mark.few("sd15]", "flux3")
@pytest.mark.parametrize("build", BUILDS)
def test_rows_and_training_are_those_of_the_directory(build, scene, tmp_path):
    model = tiny_pipelines.save(build, tmp_path / "model", **WHOLE.get(build, {}))
    file = write_file(build, model, tmp_path / "my model.safetensors")
    bare = shutil.copytree(model, tmp_path / "configs", ignore=shutil.ignore_patterns(
        "*.safetensors" if build in WHOLE else denoiser_of(build, model).parent.name))
    if build not in WHOLE:
        shutil.copytree(denoiser_of(build, model).parent, bare / denoiser_of(build, model).parent.name,
                        ignore=shutil.ignore_patterns("*.safetensors"))
    from_directory, trained = scene(model, "directory")
    from_file, again = scene(f"{file}@{bare}", "file")
    for one, other in zip(rows_of(from_directory), rows_of(from_file), strict=True):
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    assert trained.keys() == again.keys() and all(torch.equal(trained[name], again[name]) for name in trained)
    assert any(bool(value.any()) for name, value in again.items() if "lora_B" in name), "it learned"
    made = {name: json.loads(path.read_text())["models"] for name, path in
            (("directory", from_directory), ("file", from_file))}
    assert (made["file"] == made["directory"]) == (build not in WHOLE), "parts of the directory have its digests"


@pytest.mark.few("zimage")
@pytest.mark.parametrize(("build", "scale_of"), [("sd15", fp8_weights.by_tensor), ("sdxl", fp8_weights.by_tensor),
                                                 ("flux2", fp8_weights.by_row), ("zimage", fp8_weights.by_tensor)])
def test_scaled_fp8_is_what_it_means(build, scale_of, scene, tmp_path):
    """Scales apply to the matrices of the file, which libraries have in parts."""
    model = tiny_pipelines.save(build, tmp_path / "model", **WHOLE.get(build, {}))
    file = write_file(build, model, tmp_path / "x.safetensors")
    given, meant = fp8_weights.scaled(load_file(file), scale_of=scale_of, only="diffusion_model")
    save_file({**given, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, file)
    save_file({name: value.contiguous() for name, value in meant.items()}, tmp_path / "meant.safetensors")
    assert sum(name.endswith("scale_weight") for name in given) > 10
    bare = shutil.copytree(model, tmp_path / "configs")
    denoiser_of(build, bare).unlink()
    _, trained = scene(f"{tmp_path / 'meant.safetensors'}@{bare}", "meant")
    _, again = scene(f"{file}@{bare}", "file")
    assert all(torch.equal(trained[name], again[name]) for name in trained)


@pytest.mark.slow
def test_commands_that_read_a_run_find_its_single_file(scene, prep, train, tmp_path):
    """By the names in manifest and run, relative to these, though their directory has moved."""
    made = tmp_path / "all"
    model = tiny_pipelines.save("sdxl", made / "configs", second_width=48)
    file = write_original(model, made / "x.safetensors")
    for path in model.rglob("*.safetensors"):
        path.unlink()
    photos = pictures(made)
    words = ["--resolution", 64, "--step", 32, "--device", "cpu"]
    result = prep("encode", photos, "--model", f"{file}@{model}", "--cache", made / "cache", "-o", made / "m.json",
                  *words)
    assert result.code == 0, result.err
    named = json.loads((made / "m.json").read_text())["model"]
    assert named == {"path": "x.safetensors", "configs": {"path": "configs"}}
    quiet = ["--set", "sample.every=0", "--set", "validation.every=0", "--device", "cpu", "--rank", 2]
    assert train("run", made / "m.json", "-o", made / "run", "--steps", 1, *quiet).code == 0
    moved = made.rename(tmp_path / "moved")
    again = prep("encode", moved / "photos", "--model", f"{moved / 'x.safetensors'}@{moved / 'configs'}", "--cache",
                 moved / "cache", "-o", moved / "again.json", *words)
    assert again.code == 0 and "encoded: 0 latent, 0 mask, 0 text" in again.out, again
    assert train("check", moved / "m.json").code == 0
    (moved / "p.txt").write_text("a red cat\n")
    assert prep("prompts", moved / "p.txt", "--manifest", moved / "m.json", "--device", "cpu").code == 0
    result = train("sample", moved / "run", "-o", moved / "s.png", "--prompt", "a red cat", "--steps", 1,
                   "--device", "cpu")
    assert result.code == 0, result.err
    assert train("replay", moved / "run", "--step", 1).code == 0
    result = prep("inspect", moved / "m.json", "--html", moved / "page.html", "--decode", 1)
    assert result.code == 0, result.err
    result = train("merge", moved / "run", "-o", moved / "merged")
    assert result.code == 0, result.err
    whole = tiny_pipelines.save("sdxl", tmp_path / "whole", second_width=48)
    assert train("merge", moved / "run", "--model", whole, "-o", moved / "same").code == 0
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        one, other = ({each.removeprefix("text_model."): value for path in (moved / out / name).glob("*.safetensors")
                       for each, value in load_file(path).items()} for out in ("merged", "same"))
        assert one.keys() == other.keys() and all(torch.equal(one[each], other[each]) for each in one), name
    (moved / "x.safetensors").unlink()
    result = train("run", moved / "m.json", "-o", moved / "run-2", "--steps", 1, *quiet)
    assert result.code == 6 and "x.safetensors does not exist" in result.err


def test_files_with_one_vae_share_their_rows(prep, tmp_path):
    """Wherever they lie, and whatever their denoiser is; not those with another VAE."""
    model = tiny_pipelines.save("sd15", tmp_path / "model")
    first = load_file(write_original(model, tmp_path / "x.safetensors"))
    others = {"unet": "model.diffusion_model.out.2.bias", "vae": "first_stage_model.encoder.conv_in.bias",
              "text": "cond_stage_model.transformer.text_model.final_layer_norm.bias"}
    save_file({**first, "model_ema.decay": torch.ones(1)}, tmp_path / "other name.safetensors")
    for name, changed in others.items():
        save_file({**first, changed: first[changed] + 1}, tmp_path / f"{name}.safetensors")
    digests = {}
    for name in ("x", "other name", *others):
        file = open_single(tmp_path / f"{name}.safetensors", model)
        digests[name] = (vae_fingerprint(file), text_fingerprint(file),
                         base_fingerprints(file, FAMILIES["sd15"])["denoiser"])
    assert digests["x"] == digests["other name"]
    for number, name in enumerate(("vae", "text", "unet")):
        assert [one == other for one, other in zip(digests["x"], digests[name], strict=True)] == [
            number != each for each in range(3)]


WIDTH = 3072  # which diffusers' converters of FLUX.1 and Chroma take for granted
_NORMS = """
double_blocks.{}.img_attn.norm.query_norm.scale = transformer_blocks.{}.attn.norm_q.weight
double_blocks.{}.img_attn.norm.key_norm.scale = transformer_blocks.{}.attn.norm_k.weight
double_blocks.{}.txt_attn.norm.query_norm.scale = transformer_blocks.{}.attn.norm_added_q.weight
double_blocks.{}.txt_attn.norm.key_norm.scale = transformer_blocks.{}.attn.norm_added_k.weight
single_blocks.{}.norm.query_norm.scale = single_transformer_blocks.{}.attn.norm_q.weight
single_blocks.{}.norm.key_norm.scale = single_transformer_blocks.{}.attn.norm_k.weight
distilled_guidance_layer.norms.{}.scale = distilled_guidance_layer.norms.{}.weight
"""


@pytest.mark.slow
@pytest.mark.parametrize("build", ["flux", "chroma"])
def test_authors_names_at_published_width(build, tmp_path):
    """Every tensor of a model with a block of each kind is that of the file, which has 8 bits for each number."""
    import diffusers

    from prep.models.checkpoints.converted import empty_model, weights_of

    model = tiny_pipelines.save(build, tmp_path / "model")
    kind = {"flux": diffusers.FluxTransformer2DModel, "chroma": diffusers.ChromaTransformer2DModel}[build]
    config = json.loads((model / "transformer" / "config.json").read_text())
    config |= {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128,
               "axes_dims_rope": [16, 56, 56], "joint_attention_dim": 32}
    if build == "chroma":
        config |= {"approximator_hidden_dim": 64, "approximator_layers": 2}
    (model / "transformer" / "config.json").write_text(json.dumps(config))
    with torch.device("meta"), tiny_pipelines.known_warnings():
        shapes = {name: value.shape for name, value in kind.from_config(config).state_dict().items()}
    ours = {name: torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
            for name, shape in shapes.items()}
    as_bytes = {name: value.view(torch.uint8) for name, value in ours.items()}
    theirs = published(as_bytes, {"flux": original_layout.FLUX, "chroma": original_layout.CHROMA}[build] + _NORMS)
    save_file({name: value.contiguous().view(torch.float8_e4m3fn) for name, value in theirs.items()},
              tmp_path / "x.safetensors")
    files = weighted_files(open_single(tmp_path / "x.safetensors", model), "transformer")
    stored = weights_of(files, empty_model(files))
    assert stored.tensors.keys() == ours.keys()
    for name, value in ours.items():
        assert torch.equal(stored.cast(name, torch.bfloat16), value.to(torch.bfloat16)), name


@pytest.mark.parametrize(("build", "kind"), [("zimage", "Q8_0"), ("qwenimage", "Q4_0"), ("flux2", "Q5_1")])
def test_gguf_is_what_it_means(build, kind, scene, tmp_path):
    pytest.importorskip("gguf", reason="an extra")
    model = tiny_pipelines.save(build, tmp_path / "model")
    file = write_file(build, model, tmp_path / "x.safetensors")
    given = {name.removeprefix("model.diffusion_model."): value for name, value in load_file(file).items()}
    meant = gguf_files.write(tmp_path / "x.gguf", given, kind)
    save_file(meant, tmp_path / "meant.safetensors")
    assert sum(not torch.equal(value, given[name].float()) for name, value in meant.items()) > 5, "some are packed"
    denoiser_of(build, model).unlink()
    _, trained = scene(f"{tmp_path / 'meant.safetensors'}@{model}", "meant")
    _, again = scene(f"{tmp_path / 'x.gguf'}@{model}", "file")
    assert all(torch.equal(trained[name], again[name]) for name in trained)
