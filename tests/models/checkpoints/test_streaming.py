"""Denoisers and VAEs that are read straight into the form of their use: bit for bit what loading them in float32, and
changing that, makes of them.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import fp8_weights
import pytest
import real_sizes
import tiny_pipelines
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from prep.errors import ModelError
from prep.models.checkpoints import stored
from prep.models.checkpoints.streaming import kept_in_float32
from prep.models.configs import pipeline_index
from prep.models.families.registry import FAMILIES
from prep.models.loading import Form, load_diffusers
from prep.models.pipeline import infer_family, weighted_files
from prep.models.vae import load_vae
from train.config.load import parse
from train.models.denoiser import adapted, load, source_of
from train.models.quantized import QuantizedLinear, quantized

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


PEAK = """
import sys
from pathlib import Path
import torch
from prep.models.hub import locate
from train.config.load import parse
from train.models.denoiser import load

def number(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) << 10

folder, quantization, prediction = locate(sys.argv[1]), sys.argv[2], sys.argv[4]
settings = parse({"precision": "bf16", "quantization": quantization}, "test")
load(locate(sys.argv[3]), settings, prediction, torch.device("cpu"), adapt=False)  # imports, and what torch keeps
Path("/proc/self/clear_refs").write_text("5")
begun = number("VmRSS:")
model = load(folder, settings, prediction, torch.device("cpu"), adapt=False).model
print(number("VmHWM:") - begun, sum(value.nbytes for value in (*model.parameters(), *model.buffers())))
"""


@pytest.fixture(scope="module", params=[
    pytest.param(family, marks=pytest.mark.slow) if family in tiny_pipelines.SECONDARY else family
    for family in tiny_pipelines.FAMILIES])
def model(request, tmp_path_factory) -> Path:
    return tiny_pipelines.save(request.param, tmp_path_factory.mktemp(request.param) / "model")


def by_library(folder: Path, name: str) -> nn.Module:
    """A component in float32, as diffusers loads it, with values that no file has."""
    kind = getattr(diffusers, pipeline_index(folder)[name][1])
    with tiny_pipelines.known_warnings():
        return kind.from_pretrained(folder / name, torch_dtype=torch.float32,
                                    low_cpu_mem_usage=kind._keep_in_fp32_modules is not None).eval()


def changed(whole: nn.Module, dtype: torch.dtype, quantization: str) -> nn.Module:
    """What a frozen base in float32 becomes."""
    floats = set(getattr(whole, "_keep_in_fp32_modules", None) or ())
    kept = {name: value.data for name, value in whole.named_parameters() if floats & set(name.split("."))}
    nn.Module.to(whole, dtype)
    for name, value in kept.items():
        whole.get_parameter(name).data = value
    for name, layer in list(whole.named_modules()):
        if not floats & set(name.split(".")) and (new := quantized(quantization, name, layer)) is not layer:
            parent, _, last = name.rpartition(".")
            setattr(whole.get_submodule(parent), last, new)
    return whole


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model, also those that are no buffers."""
    found = dict(model.named_parameters()) | {f"buffer {name}": value for name, value in model.named_buffers()}
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            each = value if isinstance(value, list | tuple) else [value]
            found |= {f"{name}.{key} {number}": one for number, one in enumerate(each) if isinstance(one, torch.Tensor)}
    return found


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    found, wanted = tensors(ours), tensors(theirs)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and not value.is_meta, name
        assert torch.equal(value, wanted[name]), name
    assert ours.training is theirs.training
    assert {name: type(layer) for name, layer in ours.named_modules()} == {
        name: type(layer) for name, layer in theirs.named_modules()}


def ours(folder: Path, precision: str, quantization: str) -> nn.Module:
    family = FAMILIES[infer_family(folder)]
    with tiny_pipelines.known_warnings():
        return load(folder, parse({"precision": precision, "quantization": quantization}, "test"),
                    family.predictions[0], CPU, adapt=False, family=family.name).model


@pytest.mark.few("sd15", "flux-bf16-nf4")
@pytest.mark.parametrize(("precision", "quantization"), [
    ("bf16", "none"), ("bf16", "nf4"), ("fp32", "fp8"), ("bf16", "int8"),
    ("bf16", "fp8-w8a8"), *(pytest.param(precision, quantization, marks=pytest.mark.slow) for precision, quantization in
      [("fp32", "none"), ("fp16", "none"), ("bf16", "fp8"), ("fp16", "fp8"), ("fp32", "nf4"), ("fp16", "nf4")])])
def test_a_frozen_base_is_that_of_float32_rounded(model, precision, quantization):
    name = FAMILIES[infer_family(model)].denoiser
    found = ours(model, precision, quantization)
    assert_same(found, changed(by_library(model, name), DTYPES[precision], quantization))
    assert quantization == "none" or any(isinstance(layer, QuantizedLinear) for layer in found.modules())


def test_layers_of_blocks_are_quantized_and_no_others(model):
    """Blocks lie in lists; what embeds the timestep or the text, or is the last layer, does not."""
    found = ours(model, "fp32", "int8")
    lists = tuple(f"{name}." for name, layer in found.named_modules() if isinstance(layer, nn.ModuleList))
    in_float32 = kept_in_float32(found)
    linear = {name: layer for name, layer in found.named_modules() if isinstance(layer, nn.Linear)}
    assert {name for name, layer in linear.items() if isinstance(layer, QuantizedLinear)} == {
        name for name in linear if name.startswith(lists) and not in_float32(name)} != set()


def test_the_kernel_of_attention_can_be_chosen_where_the_family_says_so(model):
    """In all layers or in none: a setting that reaches some of them would be worth little."""
    family = FAMILIES[infer_family(model)]
    processors = [layer.processor for layer in ours(model, "fp32", "none").modules() if hasattr(layer, "processor")]
    reached = {hasattr(processor, "_attention_backend") for processor in processors}
    if family.name == "qwenimage21":  # only where keys are cached, as in no step of training
        assert all("backend=None" in inspect.getsource(type(processor)) for processor in processors)
        reached = {False}
    assert reached == {family.chooses_attention}


def test_all_weights_that_are_trained_are_in_float32(model):
    family = FAMILIES[infer_family(model)]
    with tiny_pipelines.known_warnings():
        found = load(model, parse({"method": "full", "precision": "bf16"}, "test"), family.predictions[0], CPU,
                     family=family.name)
    assert_same(found.model, by_library(model, family.denoiser).train())
    assert all(value.requires_grad for value in found.parameters.values())


@pytest.mark.few
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_vae_is_that_of_the_library(model, dtype):
    theirs = by_library(model, "vae")
    assert_same(load_vae(model, dtype), nn.Module.to(theirs, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "several files"])
def test_files_of_other_dtypes_variants_and_several(tmp_path, dtype, split):
    folder = tiny_pipelines.save("flux", tmp_path / "model")
    part = folder / "transformer"
    values = {name: value.to(dtype) for name, value in load_file(next(part.glob("*.safetensors"))).items()}
    shutil.move(next(part.glob("*.safetensors")), tmp_path / "plain.safetensors")
    stem = "diffusion_pytorch_model"
    if split:
        halves = [dict(list(values.items())[number::2]) for number in range(2)]
        names = [f"{stem}.fp16-{number:05}-of-00002.safetensors" for number in (1, 2)]
        for name, half in zip(names, halves, strict=True):
            save_file(half, part / name, metadata={"format": "pt"})
        placed = {key: name for name, half in zip(names, halves, strict=True) for key in half}
        (part / f"{stem}.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": placed}))
    else:
        save_file(values, part / f"{stem}.fp16.safetensors", metadata={"format": "pt"})
    found = ours(folder, "bf16", "none")
    for path in part.glob("*.fp16*"):
        path.unlink()
    save_file({name: value.float() for name, value in values.items()}, part / f"{stem}.safetensors",
              metadata={"format": "pt"})
    assert_same(found, changed(by_library(folder, "transformer"), torch.bfloat16, "none"))


@pytest.mark.parametrize("scale_of", [fp8_weights.by_tensor, fp8_weights.by_row])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_weights_times_their_scales(tmp_path, scale_of, quantization):
    folder = tiny_pipelines.save("flux", tmp_path / "model")
    path = next((folder / "transformer").glob("*.safetensors"))
    with_scales, meant = fp8_weights.scaled(load_file(path), scale_of=scale_of)
    save_file(with_scales, path, metadata={"format": "pt"})
    found = ours(folder, "bf16", quantization)
    save_file(meant, path, metadata={"format": "pt"})
    assert_same(found, changed(by_library(folder, "transformer"), torch.bfloat16, quantization))


def test_names_of_attention_that_diffusers_has_changed(tmp_path):
    """Published VAEs of Stable Diffusion have the earlier ones."""
    folder = tiny_pipelines.save("sd15", tmp_path / "model")
    wanted, path = load_vae(folder, torch.float32), next((folder / "vae").glob("*.safetensors"))
    words = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def earlier(name: str) -> str:
        for new, old in words.items():
            name = name.replace(f".{new}.", f".{old}.") if "mid_block.attentions" in name else name
        return name

    values = {earlier(name): value for name, value in load_file(path).items()}
    assert any("proj_attn" in name for name in values)
    save_file(values, path, metadata={"format": "pt"})
    assert_same(load_vae(folder, torch.float32), wanted)


def test_a_tensor_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "PIECE", 32)
    folder = tiny_pipelines.save("sd15", tmp_path / "model")
    for precision in ("fp32", "bf16"):
        assert_same(ours(folder, precision, "none"), changed(by_library(folder, "unet"), DTYPES[precision], "none"))


def test_a_layer_is_settled_and_gone_before_the_next_is_read(tmp_path):
    folder, replaced = tiny_pipelines.save("sd15", tmp_path / "model"), list[weakref.ref[nn.Module]]()

    def settle(name: str, layer: nn.Module) -> nn.Module:
        assert not any(value.is_meta for value in layer.parameters(recurse=False))
        assert not [place for place in replaced[:-1] if place() is not None]
        if type(layer) is not nn.Linear:
            return layer
        replaced.append(weakref.ref(layer))
        return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)

    load_diffusers(*source_of(folder, FAMILIES["sd15"]), "denoiser", Form(dtype=torch.float32, settle=settle))
    assert len(replaced) > 20


def test_nothing_is_read_of_weights_that_do_not_fit(tmp_path, monkeypatch):
    folder = tiny_pipelines.save("sd15", tmp_path / "model")
    path = next((folder / "unet").glob("*.safetensors"))
    save_file({name: value for name, value in load_file(path).items() if name != "conv_out.bias"}, path,
              metadata={"format": "pt"})
    monkeypatch.delattr("prep.models.checkpoints.stored._read")
    with pytest.raises(ModelError, match=r"lack conv_out\.bias"):
        load_diffusers(*source_of(folder, FAMILIES["sd15"]), "denoiser", Form(dtype=torch.float32))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says it")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantization"), [("sd15", "none"), ("sd15", "fp8"), ("sd15", "nf4"),
                                                    ("sd15 in one file", "none"), ("zimage in one file", "none")])
def test_loading_takes_the_memory_of_the_form_alone(tmp_path, name, quantization):
    """In float32 first, this one would take 3 times as much; quantized, 4 to 5 times. Z-Image's file has queries, keys
    and values in one matrix."""
    family, _, one = name.partition(" ")
    sizes: dict[str, Any] = {"sd15": (
        {"block_out_channels": (256, 512, 512, 512), "cross_attention_dim": 512},
        {"block_out_channels": (32, 32, 32, 32), "cross_attention_dim": 32}), "zimage": tuple(
        {"dim": dim, "n_heads": dim // 128, "n_kv_heads": dim // 128, "n_layers": 3, "n_refiner_layers": 1,
         "cap_feat_dim": 64} for dim in (1024, 128))}
    folder, small = (real_sizes.build(family, tmp_path / str(number), **changes)
                     for number, changes in enumerate(sizes[family]))
    places = [real_sizes.in_one_file(each, tmp_path / f"{each.name}.safetensors") if one else str(each)
              for each in (folder, small)]
    made = subprocess.run([sys.executable, "-c", PEAK, places[0], quantization, places[1],
                           "epsilon" if family == "sd15" else "flow"], check=True, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    peak, size = map(int, made.stdout.split()[-2:])
    assert size > 100_000_000 and peak < 1.15 * size + 140_000_000


@pytest.mark.few
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_base_gets_the_adapters_that_it_is_loaded_with(model, quantization):
    family, config = FAMILIES[infer_family(model)], parse({"quantization": quantization, "precision": "bf16"}, "test")
    with tiny_pipelines.known_warnings():
        base, whole = (load(model, config, family.predictions[0], CPU, adapt=adapt, family=family.name)
                       for adapt in (False, True))
        found = adapted(base, model, config, family.predictions[0])
    assert_same(found.model, whole.model)
    assert list(found.parameters) == list(whole.parameters) and list(found.weights) == list(whole.weights)
    assert {name for name, value in found.model.named_parameters() if value.requires_grad} == set(whole.parameters)


class Told:
    """A `Progress` that keeps what it is told."""

    def __init__(self):
        self.stages = []

    def __call__(self, title, total, unit):
        self.stages.append((title, total, unit, []))
        return nullcontext(self.stages[-1][3].append)


@pytest.mark.few
@pytest.mark.parametrize(("quantization", "title"), [("none", "loading the denoiser"),
                                                     ("fp8", "loading and quantizing the denoiser")])
def test_loading_says_how_far_it_is(model, quantization, title):
    family, told = FAMILIES[infer_family(model)], Told()
    with tiny_pipelines.known_warnings():
        load(model, parse({"quantization": quantization}, "test"), family.predictions[0], CPU, adapt=False,
             family=family.name, progress=told)
    (stage,) = told.stages
    size = sum(value.nbytes for path in weighted_files(model, family.denoiser).weights
               for value in load_file(path).values())
    assert stage[:3] == (title, size, "bytes") and sum(stage[3]) == size
    assert len([count for count in stage[3] if count]) > 4
