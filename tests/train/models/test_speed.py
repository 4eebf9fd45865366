"""What makes steps faster changes nothing but the last digits of numbers, and files of weights stay as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from runs import events, go
from safetensors.torch import load_file

from prep.errors import ConfigError
from train.config.load import parse
from train.models import speed

QUICK = {"steps": 2, "batch_size": 2, "validation": {"every": 0}, "sample": {"every": 0}, "lora": {"rank": 2}}


def compiled_by(monkeypatch, backend):
    """torch.compile with another backend, which needs no compiler on this machine; the list is what it compiled."""
    compiled, real = [], torch.compile

    def into(call, *args, **kwargs):
        compiled.append(type(call.__self__).__name__)
        return real(call, *args, backend=backend, **kwargs)

    monkeypatch.setattr(torch, "compile", into)
    return compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.parametrize(("method", "setting"), [("lora", "compile"), ("full", "channels_last")])
def test_steps_stay_what_they_are(make, setup_of, tmp_path, monkeypatch, method, setting):
    made, compiled = make(counts=(4, 0)), compiled_by(monkeypatch, "eager")
    for name, settings in (("plain", {}), ("faster", {setting: True})):
        go(setup_of(made, **QUICK, method=method, **settings), tmp_path / name)
    assert set(compiled) == ({"BasicTransformerBlock"} if setting == "compile" else set())
    losses = [[event["loss"] for event in events(tmp_path / name) if event["event"] == "step"]
              for name in ("plain", "faster")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    file = "lora.safetensors" if method == "lora" else "unet/diffusion_pytorch_model.safetensors"
    one, other = (load_file(tmp_path / name / file) for name in ("plain", "faster"))
    assert list(one) == list(other)
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


def test_convolutions_have_channels_last(make, setup_of):
    """Those that training changes, too."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.Linear(3, 3))
    speed.speed_up(model, parse({"channels_last": True}, "x"), torch.device("cpu"))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) and not model[0].weight.is_contiguous()


def test_a_model_without_named_blocks_is_compiled_whole(monkeypatch):
    compiled = compiled_by(monkeypatch, "eager")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    names = list(model.state_dict())
    speed.speed_up(model, parse({"compile": True}, "x"), torch.device("cpu"))
    assert compiled == ["Sequential"] and list(model.state_dict()) == names


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiler_that_fails_ends_the_run_before_the_first_step(make, setup_of, tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no C++ compiler here")

    compiled_by(monkeypatch, broken)
    told = r"^compile is on, but torch\.compile failed: .*no C\+\+ compiler here"
    with pytest.raises(ConfigError, match=told) as caught:
        go(setup_of(make(), **QUICK, compile=True), tmp_path / "run")
    assert caught.value.hint == "--no-compile, also with --resume; or install what it needs, like a C++ compiler"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_for_nvidia_gpus_only(monkeypatch, wanted):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    settings = parse({"tf32": wanted}, "x")
    speed.speed_up(torch.nn.Linear(2, 2), settings, torch.device("cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32
    speed.speed_up(torch.nn.Linear(2, 2), settings, torch.device("cuda"))
    assert torch.backends.cuda.matmul.allow_tf32 is wanted
