"""Blocks in host memory: the steps are those without, weights come in time, and nothing else moves."""

from __future__ import annotations

import shutil

import pytest
import torch
from residents import has_weights, watch_inputs, watch_residents
from runs import events, go
from safetensors.torch import load_file
from second_device import There, playing
from torch import nn

from prep.errors import ConfigError
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.device import module_to_device
from prep.loader.rows import Rows
from train.models.offload import Offloaded, block_bytes, fewest, repeated_blocks, saved, spread
from train.state import apply_gradients, clip_gradients, create_state, forward_backward

CPU = torch.device("cpu")
SETTINGS = {"steps": 3, "batch_size": 4, "micro_batch": 2, "gradient_checkpointing": True, "optimizer": {"lr": 0.05},
            "lora": {"rank": 2, "targets": "attention"}, "validation": {"every": 1, "timesteps": 2},
            "sample": {"every": 2, "steps": 2, "size": [64, 64]}}


@pytest.fixture(scope="module")
def deep_model(tiny_model, tmp_path_factory):
    """The tiny model with twelve blocks in its transformers."""
    from diffusers import UNet2DConditionModel

    folder = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(tiny_model, folder)
    config = UNet2DConditionModel.load_config(folder / "unet") | {"transformer_layers_per_block": 3}
    torch.manual_seed(7)
    UNet2DConditionModel.from_config(config).save_pretrained(folder / "unet")
    return folder


@pytest.fixture
def setup(make, setup_of, deep_model):
    """`setup(**settings)`: a run of the model with twelve blocks."""
    made = make(model=deep_model)
    return lambda **settings: setup_of(made, **{**SETTINGS, **settings})


def steps(setup, offload, number=3):
    """The adapters after some steps with so many blocks in host memory, and the trained model."""
    trainee = create_state(setup, CPU, offload=offload)
    request = draws.trial(setup.index, setup.plan, setup.config.micro_batch)
    with batches(Rows(setup.index), iter([request] * number), masked=setup.masked, pinned=False) as feed:
        for step, batch in enumerate(feed):
            torch.manual_seed(step)  # of dropout
            forward_backward(trainee, setup.config, batch)
            clip_gradients(trainee, setup.config)
            apply_gradients(trainee, setup, step)
    return {name: value.detach() for name, value in trainee.denoiser.parameters.items()}, trainee.denoiser.model


def test_blocks_are_spread_and_the_fewest_that_are_enough_are_taken():
    assert spread(12, 3) == [0, 4, 8] and spread(5, 5) == spread(5, 99) == [0, 1, 2, 3, 4] and spread(4, 0) == []
    sizes = (4, 4, 4, 2, 2, 2)
    assert [saved(sizes, count) for count in range(7)] == [0, 0, -2, 2, 4, 8, 10]  # two buffers as large as the largest
    assert [fewest(sizes, least) for least in (-1, 0, 1, 4, 5, 11)] == [0, 0, 3, 4, 5, 6]


@pytest.mark.few("nf4")
@pytest.mark.parametrize("settings", [
    {}, {"precision": "bf16"}, {"lora": {"rank": 2, "dropout": 0.3}}, {"lora": {"rank": 2, "dora": True}},
    {"lora": {"rank": 2, "kind": "lokr"}}, {"lora": {"rank": 2, "init": "pissa"}},
    {"quantization": "fp8"}, {"quantization": "nf4", "precision": "bf16"}, {"quantization": "int8"},
    {"quantization": "fp8-w8a8"}], ids=str)
def test_steps_are_the_same_to_the_last_bit(setup, monkeypatch, settings):
    """Also of layers without an adapter whose quantized weights are all that their gradient needs."""
    if settings.get("quantization") == "nf4":
        pytest.importorskip("bitsandbytes", reason="what the extra bnb installs")
    found, resident = setup(**settings), watch_residents(monkeypatch)
    wanted, model = steps(found, 0)
    assert not resident
    for count in (5, 12):
        resident.clear()
        given, model = steps(found, count)
        assert all(torch.equal(given[name], value) for name, value in wanted.items()), count
        assert {number for number, _ in resident} == {1, 2} and len(resident) == 3 * 2 * count
        assert sum(map(has_weights, repeated_blocks(model))) == 2 + 12 - count


@pytest.mark.slow
def test_what_is_spared_is_what_the_forecast_counts(setup):
    def taken(offload):
        denoiser = steps(setup(), offload, number=1)[1]
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
                    for value in (*denoiser.parameters(), *denoiser.buffers())}
        return sum(storages.values()), block_bytes(denoiser)

    (whole, sizes), (less, _) = taken(0), taken(12)
    tensors = sum(len(list(block.parameters())) for block in repeated_blocks(create_state(setup(), CPU).denoiser.model))
    assert whole - less == pytest.approx(saved(sizes, 12), abs=256 * tensors)  # each begins at a multiple of so much
    assert less < 0.6 * whole


def test_weights_are_there_before_they_are_asked_for(setup, monkeypatch):
    """From the second pass on: the first one learns the order, forward and backward."""
    resident = watch_residents(monkeypatch)
    steps(setup(), 12, number=3)
    first, *others = (resident[start : start + 24] for start in range(0, 72, 24))
    assert sum(not there for _, there in first) == 12 + 10  # backward finds the last two still there
    assert all(there for other in others for _, there in other)


def test_weights_outside_of_their_use_compute_nothing(setup):
    _, model = steps(setup(), 12)
    block = next(block for block in repeated_blocks(model) if not has_weights(block))
    with pytest.raises(RuntimeError):
        nn.Module.__call__(block.ff, torch.zeros(1, 4, 16))


def test_the_order_may_change(setup, monkeypatch):
    """A block that was not foreseen is copied when it is asked for."""
    found = create_state(setup(), CPU, offload=12).denoiser.model
    whole = create_state(setup(), CPU).denoiser.model
    pairs = list(zip(repeated_blocks(found), repeated_blocks(whole), strict=True))
    for order in (range(12), reversed(range(12)), (3, 3, 9, 0, 3, 11, 4), range(12)):
        for number in order:
            one, other = pairs[number]
            width, text = one.norm1.normalized_shape[0], one.attn2.to_k.in_features
            given = torch.randn(2, 4, width), None, torch.randn(2, 3, text)
            with torch.inference_mode():
                assert torch.equal(one(*given), other(*given))


@pytest.mark.slow
def test_a_whole_run_on_a_device_of_its_own_memory(setup, tmp_path, monkeypatch):
    """Steps, validation, pictures, a checkpoint and a resume, where tensors of host memory meet none of the device. On
    the CPU no weights are offloaded; the device of the test sums up in another order there."""
    resident, found = watch_residents(monkeypatch), setup(offload=7, gradient_checkpointing="offload")
    go(found, tmp_path / "without")
    away = watch_inputs(monkeypatch)
    assert not resident
    with playing() as there:
        go(found, tmp_path / "with", device=there)
    assert {number for number, _ in resident} == {1, 2} and away
    one, other = (load_file(tmp_path / name / "lora.safetensors") for name in ("without", "with"))
    assert all(torch.allclose(one[name], value, atol=1e-3) for name, value in other.items())
    said = [[event for event in events(tmp_path / name) if event["event"] != "step"] for name in ("without", "with")]
    assert [event["event"] for event in said[0]] == [event["event"] for event in said[1]]
    assert "offload" not in said[0][0] and said[1][0]["offload"] == 7
    with playing() as there:
        go(setup(offload=7, steps=5), tmp_path / "with", resume=True, device=there)
    assert [event["step"] for event in events(tmp_path / "with") if event["event"] == "step"] == [1, 2, 3, 4, 5]


def test_adapters_are_on_the_device_and_weights_in_host_memory():
    from peft import LoraConfig, inject_adapter_in_model

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q = nn.Linear(4, 4)

        def forward(self, given):
            return self.to_q(given)

    class Model(nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(3))

    model = Model().requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), model)
    assert block_bytes(model) == (256 + 4 * 4,) * 3  # the weight, and after its padding the bias
    with playing() as there:
        offloaded = Offloaded(model, 3, there)
        module_to_device(model, there)
        values = dict(model.named_parameters())
        assert all(isinstance(value, There) for value in values.values())
        assert all(bool(value.numel()) == ("lora" in name or "first" in name) for name, value in values.items())
        with torch.no_grad():
            model.blocks[1](torch.ones(1, 4, device=there))
        assert [has_weights(block) for block in model.blocks] == [False, True, False]
    assert len(offloaded.modules) == 3


def test_a_model_without_repeated_blocks_is_refused():
    with pytest.raises(ConfigError) as caught:
        Offloaded(nn.Sequential(nn.Linear(2, 2)), 4, CPU)
    assert caught.value.message == "offload is 4, but Sequential has no repeated blocks to keep in host memory"
    assert caught.value.hint == "--set offload=0"


@pytest.mark.parametrize(("settings", "said", "hint"), [
    ({"method": "full", "lora": {}}, "method is 'full', which trains them", "--method lora, or --set offload=0"),
    ({"gradient_checkpointing": False}, "gradient_checkpointing is off",
     "--set gradient_checkpointing=true, or --set offload=0"),
    ({"compile": True}, "compile is on, which needs weights that stay", "--no-compile, or --set offload=0"),
    ({"parallel": {"shard": True}}, "parallel.shard is on", "--no-shard, or --set offload=0")], ids=str)
@pytest.mark.parametrize("offload", [3, "auto"])
def test_settings_that_need_the_whole_model_are_refused(make, settings, said, hint, offload):
    from train.check import check
    from train.config.load import parse
    from train.setup import RunRequest

    report = check(RunRequest(manifest=make().path), parse({**SETTINGS, "offload": offload, **settings}, ""))
    (fault,) = [fault for fault in report.faults if fault.message.startswith("offload")]
    assert isinstance(fault, ConfigError) and said in fault.message and fault.hint == hint
    assert fault.message.startswith(f"offload is {offload!r}, which keeps frozen blocks of a LoRA's base in system RAM")


@pytest.mark.parametrize("value", [-1, "all", True, 1.5])
def test_only_a_number_or_auto_is_taken(value):
    from train.config.load import parse

    with pytest.raises(ConfigError, match=r"offload is .*, or \"auto\""):
        parse({"offload": value}, "")
