"""A quantized base: its weights against the published formats, its gradients, and runs that train LoRAs on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("bitsandbytes", reason="what the extra bnb installs")

from diffusers import UNet2DConditionModel
from runs import events, go
from safetensors.torch import load_file
from torch import nn

from prep.errors import ConfigError
from prep.models.families.sd15 import PRESETS
from prep.training.schema import Lora
from train.check import check
from train.config.load import parse
from train.models import lora
from train.models import quantized as quantized_module
from train.models.quantized import BLOCK, QuantizedLinear, quantized
from train.setup import RunRequest

KINDS = ["fp8", "nf4"]
IN_8_BITS = ["int8", "fp8-w8a8"]  # multiplied as such
# The 16 values of NF4 (Dettmers et al. 2023, appendix E).
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                0.7229568362236023, 1.0], np.float32)
QUICK = {"steps": 4, "batch_size": 4, "micro_batch": 2, "validation": {"every": 0}, "sample": {"every": 0}}


def layer_of(rows=48, columns=64, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=bias)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return table[np.abs(values[..., None] - table).argmin(-1)]


@pytest.mark.parametrize(("rows", "columns"), [(20, 32), (10, 96), (6, 320)])
def test_nf4_is_the_nearest_of_its_values_in_each_block(rows, columns):
    layer = layer_of(rows, columns)  # blocks of 64 may begin within a row
    weight = layer.weight.detach().numpy().reshape(-1, 64)
    scale = np.abs(weight).max(1, keepdims=True)
    found = QuantizedLinear(layer, "nf4").unpacked(torch.float32).numpy().reshape(-1, 64)
    np.testing.assert_allclose(found, nearest(weight / scale, NF4) * scale, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(48, 64), (7, 33), (1, 63), (97, 640)])  # 97 * 640 numbers are three parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_bytes_of_the_library_also_on_its_bounds_and_beside_what_is_not_finite(shape, dtype):
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    values, numbers = torch.from_numpy(NF4), layer.weight.detach().view(-1)
    bounds = (values[1:] + values[:-1]) / 2
    given = torch.cat([values, *(torch.nextafter(bounds, to) for to in (bounds, bounds - 1, bounds + 1))])
    count = min(len(numbers), 3 * BLOCK)
    numbers[:count] = torch.cat([given, torch.zeros(BLOCK), given * 1e-38, given.flip(0)])[:count]
    numbers[-BLOCK:][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    library = pytest.importorskip("bitsandbytes.functional")
    packed, state = library.quantize_4bit(numbers.float(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    found = QuantizedLinear(layer, "nf4")
    assert torch.equal(found.weight, packed) and torch.equal(found.scale.nan_to_num(), state.absmax.nan_to_num())


def test_fp8_is_the_nearest_of_its_values_in_each_row_in_every_dtype():
    layer = layer_of()
    with torch.no_grad():
        layer.weight[3] = 0.0
        layer.weight[4] *= 1e3
    weight = layer.weight.detach().numpy()
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    values = np.unique(values[np.isfinite(values)])
    largest = np.abs(weight).max(1, keepdims=True)
    scale = np.ones_like(largest)
    for row in range(len(scale)):  # the least power of two that the row fits with
        while largest[row] and largest[row] / scale[row] > 448:
            scale[row] *= 2
        while largest[row] and largest[row] / (scale[row] / 2) <= 448:
            scale[row] /= 2
    quantized = QuantizedLinear(layer, "fp8")
    found = quantized.unpacked(torch.float32).numpy()
    assert np.abs(found - nearest(weight / scale, values) * scale).max() <= 1e-12 * largest.max()
    assert not found[3].any() and np.abs(found - weight).max() / largest.max() < 2**-4
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(quantized.unpacked(dtype).float(), quantized.unpacked(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_a_plain_layer_with_the_same_weight(kind, bias):
    layer = layer_of(bias=bias)
    quantized = QuantizedLinear(layer, kind)
    plain = nn.Linear(64, 48, bias=bias)
    plain.load_state_dict({"weight": quantized.unpacked(torch.float32), **({"bias": layer.bias} if bias else {})})
    given = torch.randn(2, 5, 64)
    found = []
    for each in (quantized, plain):
        mine = given.clone().requires_grad_()
        answer = each(mine)
        answer.square().sum().backward()
        found.append((answer.detach(), mine.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with torch.autocast("cpu", torch.bfloat16):
        answer = quantized(given)
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer.float(), found[1][0], rtol=0.05, atol=0.05)


def rounded(matrix):
    """The definition of int8 in numpy: what the numbers of each row mean once they are whole."""
    scale = np.abs(matrix).max(1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(matrix / np.where(scale == 0, 1, scale)) * scale.astype(np.float64)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_multiplies_rounded_rows_forward_and_backward(bias):
    layer = layer_of(bias=bias)
    with torch.no_grad():
        layer.weight[3] = 0.0
    given = torch.randn(3, 7, 64)
    given[1, 2] = 0.0
    mine, weight = given.clone().requires_grad_(), rounded(layer.weight.detach().numpy())
    quantized = QuantizedLinear(layer, "int8")
    np.testing.assert_allclose(quantized.unpacked(torch.float32).numpy(), weight, rtol=1e-6)
    answer, wanted = quantized(mine), rounded(given.reshape(-1, 64).numpy()) @ weight.T
    shift = layer.bias.detach().numpy() if bias else 0.0
    np.testing.assert_allclose(answer.detach().reshape(-1, 48).numpy(), wanted + shift, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(3, 7, 48)
    answer.backward(gradient)
    scale = quantized.scale.numpy().T
    back = rounded(gradient.reshape(-1, 48).numpy() * scale) @ quantized.weight.numpy().astype(np.float64)
    np.testing.assert_allclose(mine.grad.reshape(-1, 64).numpy(), back, rtol=1e-4, atol=1e-6)


def in_fp8(matrix):
    """The definition of fp8-w8a8: what the numbers of each row mean in float8 with the least power of two that fits."""
    largest = matrix.abs().amax(dim=1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(torch.where(largest == 0, 1, largest) / 448)))
    return (matrix / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales_rows", [True, False])
def test_fp8_multiplies_rounded_rows_forward_and_backward(monkeypatch, bias, dtype, scales_rows):
    """Whether the device scales rows as it multiplies, or only afterwards: products are in bfloat16."""
    monkeypatch.setattr("train.models.quantized._scales_rows", lambda device: scales_rows)
    layer = layer_of(bias=bias)
    with torch.no_grad():
        layer.weight[3] = 0.0
        layer.weight[4] *= 2.0**12
    given, gradient = torch.randn(3, 7, 64, dtype=dtype), torch.randn(48, 3, 7, dtype=dtype).permute(1, 2, 0)
    given[1, 2], given[0, 1] = 0.0, given[0, 1] * 2.0**-10
    quantized, mine = QuantizedLinear(layer, "fp8-w8a8"), given.clone().requires_grad_()
    weight = in_fp8(layer.weight.detach())
    assert torch.equal(quantized.unpacked(torch.float32), weight)
    assert torch.equal(quantized.weight, QuantizedLinear(layer, "fp8").weight)
    answer, wanted = quantized(mine), in_fp8(given.reshape(-1, 64).float()) @ weight.T
    shift = layer.bias.detach().to(dtype) if bias else 0
    torch.testing.assert_close(answer.view(-1, 48).detach(), wanted.bfloat16().to(dtype) + shift, rtol=0.02, atol=1e-3)
    answer.backward(gradient)
    back = in_fp8(gradient.reshape(-1, 48).float() * quantized.scale.T) @ (weight / quantized.scale)
    torch.testing.assert_close(mine.grad.view(-1, 64), back.bfloat16().to(dtype), rtol=0.02,
                               atol=float(back.abs().max()) / 300)


@pytest.mark.parametrize(("kind", "rows", "columns", "outputs"), [
    ("int8", 16, 64, 48), ("int8", 32, 60, 48), ("int8", 32, 64, 44), ("fp8-w8a8", 16, 64, 48),
    ("fp8-w8a8", 32, 72, 48), ("fp8-w8a8", 32, 64, 40)])
def test_what_gpus_cannot_multiply_in_8_bits_is_unpacked(kind, rows, columns, outputs):
    assert_unpacked(QuantizedLinear(layer_of(outputs, columns), kind), torch.randn(rows, columns))


@pytest.mark.parametrize("kind", IN_8_BITS)
def test_devices_without_products_of_8_bits_unpack(monkeypatch, kind):
    monkeypatch.setitem(quantized_module._HAS, kind, lambda device: False)
    assert_unpacked(QuantizedLinear(layer_of(), kind), torch.randn(32, 64))


def assert_unpacked(layer, given):
    torch.testing.assert_close(layer(given), given @ layer.unpacked(torch.float32).T + layer.bias)


@pytest.mark.parametrize(("capability", "platform", "has", "scales_rows"), [
    ((8, 6), "linux", False, False), ((8, 9), "linux", True, False), ((9, 0), "linux", True, True),
    ((9, 0), "win32", True, False), ((10, 0), "linux", True, False), ((12, 0), "win32", True, False)])
def test_which_gpus_multiply_fp8_and_scale_its_rows(monkeypatch, capability, platform, has, scales_rows):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("sys.platform", platform)
    asked = quantized_module._has_fp8, quantized_module._scales_rows
    assert [call.__wrapped__(torch.device("cuda")) for call in asked] == [has, scales_rows]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", IN_8_BITS)
def test_products_of_8_bits_hide_no_overflow(bad, dtype, kind):
    """A step whose gradients are not finite is left out, so these must not come back as numbers."""
    layer, given = QuantizedLinear(layer_of(bias=False), kind), torch.randn(20, 64, dtype=dtype)
    given[3, 5] = bad
    given.requires_grad_()
    answer = layer(given)
    assert not answer[3].isfinite().any() and answer[4:].isfinite().all() and answer.dtype == dtype
    gradient = torch.ones(20, 48, dtype=dtype)
    gradient[7, 1] = bad
    answer.backward(gradient)
    assert not given.grad[7].isfinite().any() and given.grad[:7].isfinite().all()


@pytest.mark.parametrize(("kind", "low", "high"), [("int8", 0.005, 0.015), ("fp8-w8a8", 0.03, 0.045)])
def test_products_of_8_bits_are_off_by_little(kind, low, high):
    """As the guide says, for numbers that are normally distributed; bfloat16 itself is off by 0.003."""
    layer = layer_of(640, 1280, bias=False)
    given = torch.randn(512, 1280).requires_grad_()
    gradient = torch.randn(512, 640)
    found = []
    for each in (layer, QuantizedLinear(layer, kind)):
        answer = each(given)
        found.append((answer.detach(), *torch.autograd.grad(answer, given, gradient)))
    for wanted, value in zip(*found, strict=True):
        assert low < (value - wanted).norm() / wanted.norm() < high


def quantize(model, kind):
    for name, layer in list(model.named_modules()):
        if (changed := quantized(kind, name, layer)) is not layer:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, changed)


@pytest.mark.parametrize("kind", [*KINDS, *IN_8_BITS])
def test_layers_of_blocks_take_less_memory_and_others_stay(tiny_model, kind):
    unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    before = {name: module for name, module in unet.named_modules() if type(module) is nn.Linear}
    quantize(unet, kind)
    changed = {name for name, module in unet.named_modules() if isinstance(module, QuantizedLinear)}
    assert changed == {name for name in before if not name.startswith("time_embedding")} != set()
    for name in changed:
        layer, whole = unet.get_submodule(name), before[name].weight.numel()
        scales = -(-whole // 64) if kind == "nf4" else layer.out_features
        assert layer.weight.numel() == (whole // 2 if kind == "nf4" else whole)
        assert layer.weight.element_size() == 1 and layer.scale.numel() == scales
    found = lora.attach(unet, Lora(rank=2, targets="attention"), 0, PRESETS)
    assert found and all(value.dtype == torch.float32 for value in found.values())


@pytest.mark.few("nf4")
@pytest.mark.parametrize(("precision", "kind"), [
    pytest.param(precision, kind, marks=() if (precision == "bf16") == (kind == "fp8") else pytest.mark.slow)
    for precision in ("fp32", "bf16") for kind in KINDS])
def test_a_run_learns_what_one_on_the_same_weights_does(make, setup_of, tmp_path, monkeypatch, kind, precision):
    """The other run's base has the quantized numbers in ordinary layers."""
    made = make()
    settings = {**QUICK, "precision": precision, "lora": {"rank": 4}, "gradient_checkpointing": precision == "fp32"}
    go(setup_of(made, **settings, quantization=kind), tmp_path / kind)

    def undone(quantization, name, layer):
        changed = quantized(quantization, name, layer)
        if changed is layer:
            return layer
        plain = nn.Linear(changed.in_features, changed.out_features, bias=changed.bias is not None)
        plain.weight.data = changed.unpacked(torch.bfloat16 if precision == "bf16" else torch.float32)
        plain.bias = changed.bias
        return plain.requires_grad_(False)

    monkeypatch.setattr("train.models.denoiser.quantized", undone)
    go(setup_of(made, **settings, quantization=kind), tmp_path / "plain")
    losses = [[event["loss"] for event in events(tmp_path / name) if event["event"] == "step"]
              for name in (kind, "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "fp32" else 2e-3)
    ours, other = (load_file(tmp_path / name / "lora.safetensors") for name in (kind, "plain"))
    assert ours.keys() == other.keys()
    if precision == "fp32":
        for name, value in ours.items():
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [
    ("int8", "bf16"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("int8", "fp32"), ("fp8-w8a8", "fp32"), ("fp8-w8a8", "bf16")))])
def test_a_run_in_8_bits_learns_nearly_what_one_on_whole_weights_does(make, setup_of, tmp_path, kind, precision):
    made, kinds = make(), ("none", kind)
    settings = {**QUICK, "precision": precision, "lora": {"rank": 4, "targets": "all-linear"},
                "gradient_checkpointing": True}
    for each in kinds:
        go(setup_of(made, **settings, quantization=each), tmp_path / each)
    losses = [[event["loss"] for event in events(tmp_path / each) if event["event"] == "step"] for each in kinds]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.03)
    ours, other = (torch.cat([value.flatten() for name, value in sorted(load_file(
        tmp_path / each / "lora.safetensors").items()) if "lora_up" in name]) for each in kinds)
    assert torch.nn.functional.cosine_similarity(ours, other, dim=0) > 0.9


@pytest.mark.few("int8")
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.slow) if kind == "nf4" else kind for kind in (*KINDS, *IN_8_BITS)])
def test_a_resumed_run_is_the_same_to_the_byte(make, setup_of, tmp_path, kind):
    setup = setup_of(make(), **QUICK, quantization=kind, precision="bf16", lora={"rank": 2, "dropout": 0.1})
    go(setup, tmp_path / "straight")

    def stop(event):
        if event["event"] == "step" and event["step"] == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        go(setup, tmp_path / "broken", watch=stop)
    go(setup, tmp_path / "broken", resume=True)
    for name in ("lora.safetensors", "checkpoints/step-000004/optimizer.safetensors"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()


def fault_of(made, **settings):
    (fault,) = check(RunRequest(manifest=made.path), parse({**QUICK, **settings}, "test")).faults
    assert isinstance(fault, ConfigError)
    return fault


WRONG = [({"method": "full"}, "method", "--method lora"), ({"lora": {"kind": "loha"}}, "lora.kind", "lora.kind=lora"),
         ({"lora": {"dora": True}}, "lora.dora", "lora.dora=false"),
         ({"lora": {"init": "pissa"}}, "lora.init", "lora.init=kaiming"),
         ({"parallel": {"shard": True}}, "parallel.shard", "--no-shard")]


@pytest.mark.parametrize(("settings", "name", "way"), WRONG, ids=[name for _, name, _ in WRONG])
def test_settings_that_need_the_weights_are_refused(make, setup_of, settings, name, way):
    fault = fault_of(make(), quantization="fp8", **settings)
    assert fault.message == (
        "quantization is 'fp8', which is for the frozen base of a LoRA as lora.kind 'lora' adds it, but "
        f"{name} needs the weights as they are")
    assert way in fault.hint


def test_without_bitsandbytes_fp8_remains(make, setup_of, monkeypatch):
    monkeypatch.setattr("train.check.requirements.find_spec", lambda name: None)
    fault = fault_of(make(), quantization="nf4")
    assert fault.message == "quantization is 'nf4', which needs the library bitsandbytes"
    assert fault.hint == "pip install 'latentry[bnb]', or --set quantization=fp8"
    assert setup_of(make(), **QUICK, quantization="fp8").config.quantization == "fp8"
