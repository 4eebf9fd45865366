"""A training adapter is on in steps and validation, off in pictures, and in nothing that the run writes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from beside import scattered, training_adapter
from counted_steps import counted
from PIL import Image
from runs import events, go
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from prep.errors import ModelError
from prep.fs.place import Local
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from prep.models.lora.kohya import LayerSlice
from prep.training.schema import Lora
from train.check import check
from train.config.load import parse
from train.memory.room import room_of
from train.memory.step import count
from train.merging.directory import MergeRequest, merge
from train.models import lora
from train.models.adapters.beside import attach_beside, switched_off
from train.models.adapters.frozen import PART, FrozenAdapter, FrozenLayer
from train.models.offload import repeated_blocks
from train.report.provenance import provenance
from train.runs.checkpoint import read_state
from train.runs.directory import read_run
from train.sample import SampleRequest, show
from train.sampling.prompts import cached
from train.sampling.sampler import pictures
from train.setup import RunRequest
from train.show_step import replay
from train.state import create_state, forward_backward

CPU = torch.device("cpu")
SETTINGS = {"steps": 2, "batch_size": 2, "validation": {"every": 0}, "sample": {"every": 0}, "lora": {"rank": 2}}


@pytest.fixture
def beside(make, setup_of, tmp_path):
    """What was made, and the settings of a run beside a training adapter of all layers, convolutions, too."""
    made = make()
    whole = setup_of(made, **SETTINGS | {"lora": {"rank": 3, "alpha": 1.0, "targets": "kohya-conv"}})
    return made, {**SETTINGS, "base": {"adapter": training_adapter(whole, tmp_path / "beside.safetensors")}}


def gradients(setup, offload=0):
    """Those of random adapters, by name, and the model."""
    trainee = create_state(setup, CPU, offload=offload)
    scattered(trainee.denoiser.parameters, 2)
    request = draws.trial(setup.index, setup.plan, setup.config.micro_batch)
    with batches(Rows(setup.index), iter([request]), masked=setup.masked, pinned=False) as feed:
        for batch in feed:
            forward_backward(trainee, setup.config, batch)
    return {name: value.grad for name, value in trainee.denoiser.parameters.items()}, trainee.denoiser.model


def far(one, other):
    """The largest difference by the largest number of each."""
    return max(float((value - other[name]).abs().max() / value.abs().max().clamp(min=1e-9))
               for name, value in one.items())


@pytest.mark.few("lokr")
@pytest.mark.parametrize("settings", [
    {"lora": {"rank": 2, "kind": "loha"}}, {"lora": {"rank": 2, "kind": "lokr"}},
    {"lora": {"rank": 2, "targets": "kohya-conv"}}], ids=str)
def test_steps_are_those_on_the_merged_model(beside, setup_of, tiny_model, tmp_path, settings):
    """Of all families: `tests/whole/test_families.py`."""
    made, given = beside
    merge(MergeRequest(lora=tmp_path / "beside.safetensors", model=tiny_model, output=tmp_path / "merged"))
    merged = check(RunRequest(manifest=made.path, model=tmp_path / "merged"),
                   parse({"precision": "fp32", **SETTINGS, **settings}, "")).setup
    wanted, _ = gradients(merged)
    assert far(wanted, gradients(setup_of(made, **given | settings))[0]) < 1e-3
    assert far(wanted, gradients(setup_of(made, **SETTINGS | settings))[0]) > 0.1


@pytest.mark.few("nf4")
@pytest.mark.parametrize("settings", [
    {}, {"precision": "bf16"}, {"quantization": "fp8"}, {"quantization": "nf4"}, {"quantization": "int8"},
    {"quantization": "fp8-w8a8"}], ids=str)
def test_blocks_in_host_memory_and_gradient_checkpointing_change_no_bit(beside, setup_of, settings):
    if settings.get("quantization") == "nf4":
        pytest.importorskip("bitsandbytes", reason="what the extra bnb installs")
    made, given = beside
    wanted, model = gradients(setup_of(made, **given, **settings, gradient_checkpointing=False))
    blocks = len(repeated_blocks(model))
    for offload in (0, blocks):
        found, _ = gradients(setup_of(made, **given, **settings, gradient_checkpointing=True), offload)
        assert far(wanted, found) == 0
    assert far(wanted, gradients(setup_of(made, **SETTINGS, **settings))[0]) > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
def test_a_compiled_model_has_it_on_and_off(beside, setup_of, monkeypatch):
    made, given = beside
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, *args, **kwargs: real(call, *args, backend="eager", **kwargs))
    wanted, _ = gradients(setup_of(made, **given))
    found, model = gradients(setup_of(made, **given, compile=True))
    assert far(wanted, found) < 1e-3
    block = next(module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock")
    inputs, text = torch.randn(2, 16, block.norm1.normalized_shape[0]), torch.randn(2, 8, 32)
    with torch.no_grad():
        answers = [block(inputs, encoder_hidden_states=text)]
        with switched_off(model):
            answers.append(block(inputs, encoder_hidden_states=text))
        answers.append(block(inputs, encoder_hidden_states=text))
    assert torch.equal(answers[0], answers[2]) and not torch.allclose(answers[0], answers[1])


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.conv = nn.Linear(6, 8), nn.Conv2d(4, 6, 3, stride=2, padding=1)


@pytest.mark.parametrize("trained", [{}, {"dora": True}, {"init": "pissa"}, {"kind": "loha"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_is_the_product_beside_whatever_is_trained(trained, dtype):
    """DoRA's lengths are those of the weights without it, which the result is used with."""
    torch.manual_seed(0)
    model = Blocks()
    lora.attach(model, Lora(**{"rank": 2, "conv_rank": 2, "targets": ("to_q", "conv"), **trained}), 0, {})
    tensors = {"q.down": torch.randn(3, 6), "q.up": torch.randn(24, 3),  # of three layers in one
               "c.down": torch.randn(3, 4, 3, 3), "c.up": torch.randn(6, 3, 1, 1)}
    layers = {"to_q": FrozenLayer(where=LayerSlice(name="qkv", first=1, count=1, of=3), down="q.down", up="q.up",
                                  scale=0.5),
              "conv": FrozenLayer(where=LayerSlice(name="c"), down="c.down", up="c.up", scale=2.0)}
    attach_beside(model, dtype, FrozenAdapter(path=None, digest="", shapes={}, layers=layers, notes=()), tensors)
    weights = {"to_q": 0.5 * tensors["q.up"][8:16] @ tensors["q.down"],
               "conv": 2 * torch.einsum("or,rikl->oikl", tensors["c.up"].flatten(1), tensors["c.down"])}
    given = {"to_q": torch.randn(2, 5, 6), "conv": torch.randn(2, 4, 8, 8)}
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        with torch.no_grad():
            on = layer(given[name])
            with switched_off(model):
                off = layer(given[name])
        product = nn.functional.linear if weight.ndim == 2 else lambda value, weight: nn.functional.conv2d(
            value, weight, stride=2, padding=1)
        close = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(on - off, product(given[name], weight), rtol=close, atol=5 * close)
    assert not any(value.requires_grad for name, value in model.named_parameters() if "training_adapter" in name)


@pytest.mark.slow
def test_its_memory_is_known_before_weights_are_loaded(beside, setup_of):
    made, given = beside
    setup = setup_of(made, **given)
    (wanted, *_), found = counted(setup), count(setup, room_of("cpu")).parts
    assert found["weights"] == wanted["weights"] and found["adapters"] == wanted["adapters"]
    alone = count(setup_of(made, **SETTINGS), room_of("cpu")).parts
    numbers = sum(value.numel() for name, value in load_file(given["base"]["adapter"]).items() if "alpha" not in name)
    assert found["weights"] - alone["weights"] == 4 * numbers and found["adapters"] == alone["adapters"]


def test_a_run_has_it_in_its_record_alone(beside, setup_of, tmp_path):
    """Validation is with it, pictures are without, and the files of the run name it without its path."""
    made, given = beside
    more = {"validation": {"every": 1, "timesteps": 2}, "sample": {"every": 1, "steps": 2, "size": [64, 64]}}
    for name, settings in (("alone", SETTINGS), ("run", given)):
        go(setup_of(made, **settings | more), tmp_path / name)
    first = {name: next(event for event in events(tmp_path / name) if event["event"] == "validation")["loss"]
             for name in ("alone", "run")}
    assert first["alone"] != pytest.approx(first["run"], rel=1e-3)
    grids = [np.asarray(Image.open(tmp_path / name / "samples" / "step-000000.png")) for name in ("alone", "run")]
    assert np.array_equal(*grids)
    result, plain = (tmp_path / name / "lora.safetensors" for name in ("run", "alone"))
    assert load_file(result).keys() == load_file(plain).keys()
    with safe_open(result, framework="pt") as file:
        metadata = file.metadata()
    digest = setup_of(made, **given).model.adapter.digest
    assert json.loads(metadata["latentry.base"])[PART] == digest
    assert json.loads(metadata["latentry.config"])["base"]["adapter"] == "beside.safetensors"
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"| Fingerprint of {PART} | `{digest}` |" in card and 'base.adapter = "beside.safetensors"' in card
    assert str(tmp_path) not in "".join((card, *metadata.values()))
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000002").base[PART] == digest
    assert dict(provenance(read_run(Local(tmp_path / "run"))))[f"{PART}, fingerprint"] == digest


def test_pictures_and_replays_need_no_file(beside, setup_of, tiny_model, tmp_path):
    """`train sample` draws what a run that never had it would draw of the same weights."""
    made, given = beside
    go(setup_of(made, **given), tmp_path / "run")
    (tmp_path / "beside.safetensors").unlink()
    drawn = show(SampleRequest(run=Local(tmp_path / "run"), which=("before", "after"), steps=2), CPU,
                 tmp_path / "grid.png")
    assert not drawn.warnings
    assert len(replay(Local(tmp_path / "run"), 1).samples) == 2
    trained = setup_of(made, **SETTINGS)
    state = create_state(trained, CPU)
    tensors = lora.unpack(load_file(tmp_path / "run" / "lora.safetensors"), state.denoiser.parameters,
                          trained.model.naming)
    with torch.no_grad():
        for name, value in state.denoiser.parameters.items():
            value.copy_(tensors[name])
    wanted = pictures(state.denoiser, Rows(trained.index), tiny_model, cached(trained.index),
                      replace(trained.config.sample, steps=2))
    assert all(np.array_equal(one, other) for one, other in zip(drawn.pictures[1::2], wanted, strict=True))


def test_a_resumed_run_wants_the_same_file_wherever_it_lies(beside, setup_of, tmp_path):
    made, given = beside
    go(setup_of(made, **given), tmp_path / "run")
    whole = setup_of(made, **SETTINGS | {"lora": {"rank": 3, "alpha": 1.0, "targets": "kohya-conv"}})
    (tmp_path / "beside.safetensors").rename(tmp_path / "moved.safetensors")
    other = training_adapter(whole, tmp_path / "other.safetensors", seed=5)
    more = {**given, "steps": 3}
    for path in ("", other):
        setup = setup_of(made, **more | {"base": {"adapter": path}})
        now = setup.model.base.get(PART, "none")[:12]
        with pytest.raises(ModelError, match=f"^the training adapter differs from that of step-000002: it is {now}, "
                           "expected ") as caught:
            go(setup, tmp_path / "run", resume=True)
        assert caught.value.hint.startswith("name that of the run with --set base.adapter=FILE, or add --adopt")
    go(setup_of(made, **more | {"base": {"adapter": str(tmp_path / "moved.safetensors")}}), tmp_path / "run",
       resume=True)
    go(setup_of(made, **more | {"steps": 4, "base": {"adapter": other}}), tmp_path / "run", resume=True, adopt=True)
    (adopted,) = read_state(tmp_path / "run" / "checkpoints" / "step-000004").adopted
    assert adopted["step"] == 3 and adopted["changes"][0].startswith(f"{PART} ")


def test_a_file_that_changes_after_the_check_is_refused(beside, setup_of, tmp_path):
    made, given = beside
    setup = setup_of(made, **given)
    path = tmp_path / "beside.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ModelError, match=r"beside\.safetensors cannot be used: "):
        create_state(setup, CPU)

