"""Whether a run fits, and what makes it fit: with figures in place of counted ones, and once counted."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import real_manifest
import real_sizes
import torch
from diffusers import UNet2DConditionModel

from prep.cli import ticker
from prep.errors import ConfigError
from prep.models.device.counting import Counted
from train.memory import forecast as module
from train.memory.forecast import blocks_offloaded, changed_by, forecast, recomputing, spelled, ways
from train.memory.room import room_of
from train.memory.step import INPUTS, SLOTS, Taken, count
from train.parallel.ranks import Ranks

GIB = 1 << 30


@pytest.fixture
def setup(make, setup_of):
    """The checked setup of the demo's model."""
    return setup_of(make(), precision="auto", steps=2, batch_size=2, ema={"decay": 0.9},
                    gradient_checkpointing=False)


@pytest.fixture
def figured(monkeypatch):
    """Bytes by settings, as larger models have them, so that each setting helps."""
    def count(setup, room, world=1):
        config = setup.config
        found = {"weights": {"none": 8, "fp8": 4, "nf4": 2}[config.quantization] * GIB,
                 "adapters": config.lora.rank * GIB // 16, "optimizer": config.lora.rank * GIB // 8,
                 "activations": config.micro_batch * (1 if config.recomputes else 6) * GIB}
        if config.optimizer.name == "adamw-8bit":
            found["optimizer"] //= 4
        if config.ema.device == "model":
            found["average"] = GIB
        return found

    monkeypatch.setattr(module, "count", lambda setup, room, world=1: Taken(
        parts=count(setup, room, world), samples=setup.config.micro_batch))


def told(setup, size):
    room = replace(room_of("auto", size), libraries=0)
    return [(way.settings, way.peak, way.fits) for way in ways(setup, forecast(setup, room))]


def test_settings_are_tried_by_what_they_cost_until_one_fits(setup, figured):
    assert told(setup, 24 * GIB) == []
    assert told(setup, 23 * GIB) == [({"ema.device": "cpu"}, 23 * GIB, True)]
    free = {"ema.device": "cpu", "gradient_checkpointing": True}
    assert told(setup, 13 * GIB)[1:] == [(free, 13 * GIB, True)]
    assert told(setup, 12 * GIB)[2:] == [({**free, "micro_batch": 1}, 12 * GIB, True)]
    least = told(setup, GIB)[-1]
    assert not least[2] and least[0]["quantization"] == "nf4" and least[0]["lora.rank"] == 4


@pytest.mark.slow
def test_references_are_counted_among_the_inputs(make, setup_of):
    """At their own sizes, in the dtype of the cache, of each sample of the largest pass."""
    alone, more = (count(setup_of(make(references=sizes), steps=2, batch_size=2), room_of("cpu", GIB)).parts[INPUTS]
                   for sizes in ((), ((64, 64), (48, 32))))
    cells, channels, samples, bytes_each = (64 * 64 + 48 * 32) // 8**2, 4, 2, 2
    assert more - alone == SLOTS * cells * channels * samples * bytes_each


def test_auto_recomputes_where_a_pass_would_fail_without(make, setup_of, figured):
    """By what is free on a GPU; a CPU has no pass that fails."""
    setup = setup_of(make(), precision="auto", steps=2, batch_size=2, ema={"decay": 0.9})
    assert setup.config.gradient_checkpointing == "auto"

    def peak(size, device="auto", world=1, **settings):
        found = forecast(setup, replace(room_of(device, size), libraries=0), settings, world=world)
        return found.peak // GIB, found.unrecomputed // GIB

    assert peak(24 * GIB) == (24, 0) and peak(23 * GIB) == (14, 24) and peak(23 * GIB, "cpu")[1] == 0
    assert peak(24 * GIB, gradient_checkpointing=True) == (14, 0)
    assert peak(24 * GIB, offload=4) == (14, 0)
    assert told(setup, 14 * GIB) == [] and told(setup, 13 * GIB) == [({"ema.device": "cpu"}, 13 * GIB, True)]
    assert told(setup, 12 * GIB)[1:] == [({"ema.device": "cpu", "micro_batch": 1}, 12 * GIB, True)]


def test_processes_that_divide_a_model_ask_the_forecast(make, setup_of, figured, monkeypatch):
    """It is turned on if nine tenths of the memory of one of them are too little, or if nothing is known."""
    made, there = make(), torch.device("cuda")
    settings = {"precision": "auto", "steps": 2, "batch_size": 2, "parallel": {"shard": True}}
    setup = setup_of(made, **settings)

    def on(setup, size, world=2, device=there):
        monkeypatch.setattr(module, "room_of", lambda name: replace(room_of("auto", size), libraries=0))
        found, said = recomputing(setup, device, Alike(world=world))
        return found.config.gradient_checkpointing, said

    why = "gradient checkpointing is on, since a step would take about 24.0 GiB without, of 26.0 GiB"
    assert on(setup, 26 * GIB) == (True, [why]) and on(setup, 27 * GIB) == ("auto", [])
    assert on(setup, GIB, world=1) == on(setup, GIB, device=torch.device("cpu")) == ("auto", [])
    assert on(setup_of(made, **settings, gradient_checkpointing=False), GIB) == (False, [])
    monkeypatch.setattr(Alike, "any", lambda self, flag: True)
    assert on(setup, 27 * GIB)[1] == ["gradient checkpointing is on, since another process has less memory"]
    monkeypatch.setattr(module, "count", lambda *_: 1 / 0)
    assert on(setup, 27 * GIB)[0] is True


class Alike(Ranks):
    """Processes that have the same to say."""

    def any(self, flag):
        return flag


def test_full_fine_tuning_has_ways_of_its_own(make, setup_of, monkeypatch):
    """Bytes as of SDXL; a pass of all samples has to leave room for what gradients took."""
    def count(setup, room, world=1):
        config = setup.config
        half, moments = config.full.dtype == "bfloat16", {"adamw": 20, "adamw-8bit": 5, "adafactor": 1}
        each = (4 if config.gradient_checkpointing else 20) * config.micro_batch // (2 if half else 1)
        found = {"weights": 5 if half else 10, "optimizer": moments[config.optimizer.name], "activations": each,
                 "gradients": 0 if config.full.fused_backward else 5 if half else 10}
        return Taken(parts={name: size * GIB for name, size in found.items()}, samples=config.micro_batch)

    monkeypatch.setattr(module, "count", count)
    monkeypatch.setattr("train.check.requirements.find_spec", lambda name: True)
    setup = setup_of(make(), precision="auto", method="full", batch_size=2, gradient_checkpointing=False)
    at_first = {"gradient_checkpointing": True, "micro_batch": 1, "optimizer.name": "adamw-8bit"}
    within = {**at_first, "full.fused_backward": True, "micro_batch": 2}
    assert told(setup, 29 * GIB)[-1] == (at_first, 29 * GIB, True)
    assert told(setup, 24 * GIB)[-1] == (within, 23 * GIB, True)
    assert told(setup, 14 * GIB)[-1] == ({**within, "full.dtype": "bfloat16"}, 14 * GIB, True)
    last = {**within, "full.dtype": "bfloat16", "optimizer.name": "adafactor"}
    assert told(setup, 9 * GIB)[-1] == (last, 10 * GIB, False)
    room = replace(room_of("auto", 20 * GIB), libraries=0)
    several = [way.settings for way in ways(setup, forecast(setup, room), world=2)]
    assert several[-1] == {**at_first, "full.dtype": "bfloat16"}, "several processes sum gradients"
    assert changed_by(setup.config, last).full.fused_backward


@pytest.fixture
def sdxl(make, monkeypatch, tmp_path, tiny_model):
    """A manifest of 1024 x 1024 for a UNet as large as SDXL's, without the embedding of sizes, which is 0.1 % of it: it
    is of SD 2's family. Its file of weights has no data."""
    left_out = ("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim")
    config = {name: value for name, value in real_sizes.SIZES["sdxl"].config.items() if name not in left_out}
    model = shutil.copytree(tiny_model, tmp_path / "large")
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config)
    shutil.rmtree(model / "unet")
    unet.save_config(model / "unet")
    layout, at = {}, 0
    for name, value in unet.state_dict().items():
        layout[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [at, at + 2 * value.numel()]}
        at += 2 * value.numel()
    header = json.dumps(layout).encode()
    with (model / "unet" / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    for name, value in (("BUCKETS", ((1024, 1024),)), ("TOKENS", 77), ("WIDTH", 2048)):
        monkeypatch.setattr(real_manifest, name, value)
    return make(model=model, counts=(4,), validation=0, prompts=None, masks=False,
                change=lambda document: document.update(family="sd21"))


@pytest.mark.slow
def test_full_fine_tuning_of_sdxl_fits_into_24_gb(sdxl, setup_of):
    """With moments in 8 bits, updates in the backward pass and weights in float32: 21.3 GiB instead of 25.6. In
    bfloat16 13.4, and with Adafactor 9.5."""
    pytest.importorskip("bitsandbytes")
    setup = setup_of(sdxl, precision="auto", method="full", steps=2)
    room = room_of("auto", 24 * 10**9)
    *_, before, last = ways(setup, forecast(setup, room))
    assert before.settings["optimizer.name"] == "adamw-8bit" and not before.fits
    assert last.settings == {**before.settings, "full.fused_backward": True} and last.fits
    assert before.peak == pytest.approx(25.6 * GIB, rel=0.02) and last.peak == pytest.approx(21.3 * GIB, rel=0.02)
    half = {**last.settings, "gradient_checkpointing": True, "full.dtype": "bfloat16"}
    assert forecast(setup, room, half).peak == pytest.approx(13.4 * GIB, rel=0.02)
    assert forecast(setup, room, {**half, "optimizer.name": "adafactor"}).peak == pytest.approx(9.5 * GIB, rel=0.02)


@pytest.fixture
def in_blocks(monkeypatch):
    """Bytes by settings of a model with eight blocks, which are nearly all of it."""
    def count(setup, room, world=1):
        unit = {"none": 4, "fp8": 2, "nf4": 1}[setup.config.quantization] * GIB
        parts = {"weights": 8 * unit + GIB, "adapters": GIB, "optimizer": 2 * GIB,
                 "activations": GIB if setup.config.recomputes else 2 * GIB}
        return Taken(parts=parts, samples=1, blocks=(unit,) * 8)

    monkeypatch.setattr(module, "count", count)


def test_blocks_in_host_memory_cost_less_than_other_numbers(make, setup_of, in_blocks):
    """They come after what costs nothing or time elsewhere, as few as are enough, and fewer of a quantized base."""
    setup = setup_of(make(), precision="auto", steps=2, batch_size=1, optimizer={"name": "lion"},
                     gradient_checkpointing=False)
    assert told(setup, 36 * GIB) == [({"gradient_checkpointing": True}, 37 * GIB, False),
                                     ({"gradient_checkpointing": True, "offload": 3}, 33 * GIB, True)]
    *_, (settings, peak, fits) = told(setup, 20 * GIB)
    assert (settings["offload"], peak, fits) == (7, 17 * GIB, True)
    *_, all_of_them, (settings, peak, fits) = told(setup, 10 * GIB)
    assert all_of_them[0]["offload"] == 8 and not all_of_them[2]
    assert settings == {"gradient_checkpointing": True, "offload": 8, "quantization": "fp8"} and fits
    *_, (settings, peak, fits) = told(setup, 12 * GIB)
    assert (settings["offload"], peak, fits) == (7, 11 * GIB, True)


def test_a_forecast_says_which_blocks_are_elsewhere(make, setup_of, in_blocks):
    settings = {"precision": "auto", "steps": 2, "gradient_checkpointing": True}
    made = make()
    room = replace(room_of("auto", 30 * GIB), libraries=0)
    found = forecast(setup_of(made, **settings, offload=5), room)
    assert found.parts["weights"] == (33 - 5 * 4 + 2 * 4) * GIB and found.fits
    assert "peak: 25.0 GiB (" in found.line and "), with 5 of 8 blocks (20.0 GiB) in system RAM; a GPU" in found.line
    auto = setup_of(made, **settings, offload="auto")
    assert forecast(auto, room).offloaded == 5  # which leaves a tenth of the memory free
    assert forecast(auto, replace(room, free=None)).offloaded == 0
    assert forecast(auto, replace(room, free=GIB)).offloaded == 8


def test_auto_finds_out_how_many_blocks_a_run_offloads(make, setup_of, in_blocks, monkeypatch):
    made, settings = make(), {"precision": "auto", "steps": 2, "gradient_checkpointing": True}
    there = torch.device("cuda")
    monkeypatch.setattr(module, "room_of", lambda name: replace(room_of("auto", 30 * GIB), libraries=0))
    assert blocks_offloaded(setup_of(made, **settings, offload="auto"), there) == 5
    assert blocks_offloaded(setup_of(made, **settings, offload=3), there) == 3
    assert blocks_offloaded(setup_of(made, **settings), there) == 0
    assert blocks_offloaded(setup_of(made, **settings, offload="auto"), torch.device("cpu")) == 0
    monkeypatch.setattr(module, "count", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match="cannot be estimated: division by zero") as caught:
        blocks_offloaded(setup_of(made, **settings, offload="auto"), there)
    assert caught.value.hint == "name a number of blocks: --set offload=N"


@pytest.mark.slow
def test_the_blocks_of_a_model_are_counted(setup):
    """All four of the tiny model; none where the model has to be whole on the device, or shares its memory."""
    def blocks(device="auto", **settings):
        return forecast(setup, room_of(device, 1 << 40), settings).blocks

    usual = blocks()
    assert len(usual) == 4 and 0 < sum(usual) < forecast(setup, room_of("auto", 1 << 40)).parts["weights"]
    assert sum(blocks(quantization="fp8")) < 0.8 * sum(usual)
    assert blocks("cpu") == blocks(method="full") == blocks(compile=True) == ()


@pytest.mark.slow
def test_check_names_the_blocks(make, train):
    made = make()
    words = ["check", made.path, "--steps", 2, "--set", "gradient_checkpointing=true", "--set", "offload=4", "--memory",
             "12GB"]
    assert ", with 4 of 4 blocks (" in train(*words).out
    assert "offload has no effect: the device is cpu" in train(*words, "--device", "cpu").out


def test_a_smaller_micro_batch_divides_the_batch(make, setup_of, figured):
    """Of batch_size = 4 there are micro-batches of 2 and 1 samples, and none of 3, even where 3 would fit."""
    setup = setup_of(make(), precision="auto", steps=2, batch_size=4, gradient_checkpointing=True)
    rest = forecast(setup, replace(room_of("auto", GIB), libraries=0)).peak - 4 * GIB
    for room, size in ((3, 2), (2, 2), (1, 1)):
        assert told(setup, rest + room * GIB) == [({"micro_batch": size}, rest + size * GIB, True)]


def test_a_run_surely_does_not_fit_only_beyond_what_a_forecast_may_be_wrong_by(setup, figured):
    room = replace(room_of("auto", 22 * GIB), libraries=GIB)
    found = forecast(setup, room)
    assert found.peak == 25 * GIB and not found.fits and not found.impossible
    assert forecast(setup, replace(room, total=21 * GIB)).impossible
    assert forecast(setup, replace(room, total=None, free=None)).fits is None


def test_settings_are_changed_by_their_names(setup):
    given = {"lora.rank": 4, "micro_batch": 1, "optimizer.name": "adamw-8bit"}
    changed = changed_by(setup.config, given)
    assert (changed.lora.rank, changed.micro_batch, changed.optimizer.name) == (4, 1, "adamw-8bit")
    assert spelled(given) == "--set lora.rank=4 --set micro_batch=1 --set optimizer.name=adamw-8bit"


def test_a_gpu_that_is_not_there_computes_in_half_precision(setup):
    at_home, there = (forecast(setup, room_of(device, 1 << 40)) for device in ("cpu", "auto"))
    assert there.room.kind == "cuda" and at_home.room.kind == "cpu"
    assert there.parts["weights"] < 0.6 * at_home.parts["weights"]
    assert there.parts["adapters"] == at_home.parts["adapters"]  # which are float32 in any case


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mps", "xpu"))])
def test_precision_auto_is_that_of_training_on_a_device_that_is_there(setup, monkeypatch, kind):
    """Apple's and Intel's GPUs, and old ones of NVIDIA, train in float32 with it; an NVIDIA GPU that is only named has
    bfloat16."""
    there = torch.device(kind)
    monkeypatch.setattr("train.memory.room.checked_device", lambda name: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    weights = forecast(setup, room_of("auto")).parts["weights"]
    half = forecast(setup, room_of("auto"), {"precision": "bf16"}).parts["weights"]
    assert half < 0.6 * weights
    named = forecast(setup, room_of("auto", GIB)).parts["weights"]
    assert named == (half if kind == "cuda" else weights)


@pytest.mark.slow
def test_what_settings_save_is_counted(setup):
    def parts(**settings):
        return forecast(setup, room_of("cpu", 1 << 40), settings).parts

    usual = parts()
    assert parts(gradient_checkpointing=True)["activations"] < 0.8 * usual["activations"]
    assert parts(micro_batch=1)["activations"] < 0.7 * usual["activations"]
    recomputed = parts(gradient_checkpointing=True)["activations"]
    assert parts(gradient_checkpointing="offload")["activations"] == recomputed  # in the same memory
    assert parts(**{"lora.rank": 4})["adapters"] * 4 == usual["adapters"]
    in_8_bits = {parts(quantization=kind)["weights"] for kind in ("fp8", "int8", "fp8-w8a8")}
    assert len(in_8_bits) == 1 and max(in_8_bits) < usual["weights"]
    assert parts(**{"ema.decay": 0.0})["average"] == 0
    assert parts(method="full")["adapters"] == 0


@pytest.mark.slow
def test_what_blocks_are_recomputed_from_is_not_counted_in_host_memory(setup, monkeypatch):
    def activations(way):
        found = forecast(setup, room_of("auto", 1 << 40), {"gradient_checkpointing": way})
        return found.parts["activations"]

    assert activations("offload") == activations(True)  # of the tiny model: its tensors are small
    monkeypatch.setattr("train.memory.step.LEAST", 1 << 10)
    assert activations("offload") < activations(True)


def test_what_moves_to_host_memory_by_itself_is_not_counted(setup):
    pytest.importorskip("bitsandbytes")
    room = room_of("auto", 1 << 40)
    whole, paged = (forecast(setup, room, {"optimizer.name": name}) for name in ("adamw-8bit", "adamw-8bit-paged"))
    assert whole.parts["optimizer"] > 0 and paged.parts["optimizer"] == 0
    assert paged.parts["weights"] == whole.parts["weights"]


@pytest.mark.slow
def test_a_smaller_micro_batch_is_planned_anew(make, setup_of):
    """Four ranks divide it: of 8 samples each has 2, of 4 one. A resumed run divides those of its plan."""
    setup = setup_of(make(counts=(16, 0)), precision="auto", batch_size=16, micro_batch=8, steps=2)
    room = room_of("auto", 1 << 40)
    before, after = (forecast(setup, room, settings, world=4) for settings in ({}, {"micro_batch": 4}))
    assert (before.samples, after.samples) == (2, 1)
    assert after.parts["activations"] < 0.7 * before.parts["activations"]
    resumed = replace(setup, config=replace(setup.config, micro_batch=4))
    assert forecast(resumed, room, {"lora.rank": 2}, world=4).samples == 2


def test_memory_that_this_process_has_is_free_for_its_own_libraries(monkeypatch):
    monkeypatch.setattr("train.memory.room.available", lambda: 5 * GIB)
    found = room_of("cpu")
    assert found.free == 5 * GIB + found.libraries


def test_memory_is_counted_once_and_until_it_is_freed():
    with Counted() as mode:
        whole = torch.zeros(1000)
        half = whole[:500]
        mode.add("weights", [whole])
        with mode.making("inputs"):
            more = torch.ones(10)
        assert mode.live == {"weights": 4000, "inputs": 40, "activations": 0}
        del whole
        assert mode.live["weights"] == 4000  # the view holds it
        del half, more
        assert not any(mode.live.values()) and sum(mode.peak.values()) == 4040
        mode.reset_peak()
        assert sum(mode.peak.values()) == 0


def test_check_says_what_a_step_takes(make, train):
    made = make()
    document = train("check", made.path, "--steps", 2, "--device", "cpu", "--json").json
    memory = document["memory"]
    assert document["ok"] and memory["device"] == "cpu" and memory["peak"] == sum(memory["parts"].values())
    assert memory["free"] <= memory["total"] and memory["parts"]["libraries"] > 1 << 20
    text = train("check", made.path, "--steps", 2, "--memory", "12GB").out
    assert "estimated memory at the peak: " in text and "; a GPU has 12.0 GiB" in text


def test_check_says_that_it_estimates(make, train, monkeypatch):
    """Which takes 20 CPU seconds for SDXL."""
    shown = []

    def watched(*args, **options):
        shown.extend(each.title for each in ticker._open)
        return forecast(*args, **options)

    monkeypatch.setattr(module, "forecast", watched)
    assert train("check", make().path, "--steps", 2).code == 0
    assert shown == ["estimating memory"]


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_a_fault_with_the_settings_that_help(make, train):
    made = make()
    found = train("check", made.path, "--steps", 2, "--memory", "100KB", "--json")
    assert found.code == 9 and not found.json["ok"]
    (fault,), memory = found.json["faults"], found.json["memory"]
    assert re.fullmatch("a step of this run takes about [0-9.]+ MiB of memory, but a GPU has 100.0 KiB", fault["what"])
    assert not memory["fits"] and memory["ways"][0]["settings"] == {"micro_batch": 1}
    said = train("check", made.path, "--steps", 2, "--memory", "100KB")
    assert ", with gradient checkpointing, since it would take " in said.out
    assert said.code == 9 and "those that cost least first" in said.out
    assert "hint: a device with more memory" in said.err


def test_a_size_that_is_none_is_refused(make, train):
    found = train("check", make().path, "--steps", 2, "--memory", "much")
    assert found.code == 2 and "--memory is 'much', expected a size like 200GB or 2TB" in found.err


def test_init_writes_settings_with_which_a_run_fits(make, train, tmp_path, figured, monkeypatch):
    made, file = make(), tmp_path / "made.toml"
    monkeypatch.setattr("train.memory.room.CONTEXT", 0)
    assert train("init", made.path, "--memory", "15GB", "-o", file).code == 0
    assert '\ngradient_checkpointing = "auto"' in file.read_text() and "\nmicro_batch = 2" in file.read_text()
    assert train("check", made.path, "-c", file, "--memory", "15GB", "--json").json["memory"]["fits"]
    least = train("init", made.path, "--memory", "1GB", "-o", tmp_path / "none.toml")
    assert least.code == 9 and "no settings make a run of " in least.err and not (tmp_path / "none.toml").exists()
    alone = train("init", "--memory", "12GB", "-o", tmp_path / "none.toml")
    assert alone.code == 2 and "--memory is given without MANIFEST" in alone.err
