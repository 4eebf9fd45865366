"""What makes steps faster changes nothing but the last digits of numbers, and files of weights stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import tiny_pipelines
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from runs import events, go
from safetensors.torch import load_file

from prep.errors import ConfigError
from prep.training.schema import Attention
from train.config.load import parse
from train.models import speed
from train.models.denoiser import load

QUICK = {"steps": 2, "batch_size": 2, "validation": {"every": 0}, "sample": {"every": 0}, "lora": {"rank": 2}}


def compiled_by(monkeypatch, backend):
    """torch.compile with another backend, which needs no compiler on this machine; the list is what it compiled."""
    compiled, real = [], torch.compile

    def into(call, *args, **kwargs):
        compiled.append(type(call.__self__).__name__)
        return real(call, *args, backend=backend, **kwargs)

    monkeypatch.setattr(torch, "compile", into)
    return compiled


@pytest.mark.slow
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


@pytest.fixture
def flux(tmp_path):
    """A tiny denoiser whose attention goes through diffusers' dispatch, which a test may change for this process."""
    folder = tiny_pipelines.save("flux", tmp_path / "model")
    with attention_backend("native"), tiny_pipelines.known_warnings():
        yield load(folder, parse({}, "x"), "flow", torch.device("cpu"), adapt=False, family="flux").model


def test_the_kernel_of_attention_that_is_named_computes_it(flux, monkeypatch):
    """Those of GPUs are not here, so PyTorch's plain formula takes the place of one."""
    monkeypatch.setattr(speed, "_KERNELS", {"cudnn": "_native_math"})
    called = []
    math = _AttentionBackendRegistry._backends[AttentionBackendName("_native_math")]
    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName("_native_math"),
                        lambda *args, **kwargs: (called.append(1), math(*args, **kwargs))[1])
    speed.speed_up(flux, parse({"attention": "cudnn"}, "x"), torch.device("cpu"))
    layers = [layer for layer in flux.modules() if hasattr(layer, "processor")]
    assert {layer.processor._attention_backend for layer in layers} == {"_native_math"}
    torch.manual_seed(0)
    width = flux.config.attention_head_dim * flux.config.num_attention_heads
    with torch.no_grad():
        layers[-1](torch.randn(1, 6, width))
    assert called


@pytest.mark.parametrize("name", ["flash", "flash-3", "xformers"])
def test_a_kernel_that_is_not_installed_is_an_error(flux, monkeypatch, name):
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN", False)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN_3", False)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", False)
    with pytest.raises(ConfigError, match=f"attention is '{name}': ") as caught:
        speed.speed_up(flux, parse({"attention": name}, "x"), torch.device("cpu"))
    assert caught.value.hint == "--set attention=native"


def test_each_kernel_is_known_to_diffusers():
    assert set(speed._KERNELS) == set(get_args(Attention)) - {"native"}
    for name in speed._KERNELS.values():
        assert AttentionBackendName(name) in _AttentionBackendRegistry._backends
