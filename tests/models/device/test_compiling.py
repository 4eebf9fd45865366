"""`prep encode --compile`: rows as without it, with any backend, or with none. The quick backend compiles nothing."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from pictures import draw
from torch import nn

from prep.models.device import compiling
from prep.models.device.compiling import Compiler, is_whole
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.text.encoder import TextEncoder
from prep.models.vae import VaeEncoder

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def forgotten():
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are given to a backend, which runs them as they are."""
    found = []

    def backend(graph, _examples):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", backend)
    return found


def failing(graph, _examples):
    raise RuntimeError("no C compiler\nbeyond the first line")


def test_a_module_runs_compiled_if_that_is_wanted(graphs):
    module = nn.Linear(3, 4)
    wanted = module(X)
    Compiler().apply(module, "the VAE")
    assert torch.equal(module(X), wanted) and not graphs
    compiler = Compiler(wanted=True)
    compiler.apply(module, "the VAE")
    assert torch.equal(module(X), wanted) and len(graphs) == 1 and not compiler.notices


def test_what_cannot_be_compiled_runs_as_it_is_and_is_tried_once(monkeypatch):
    tried = []

    def counted(*given):
        tried.append(given)
        return failing(*given)

    monkeypatch.setattr(compiling, "BACKEND", counted)
    module, compiler = nn.Linear(3, 4), Compiler(wanted=True)
    wanted = module(X)
    compiler.apply(module, "the VAE")
    assert torch.equal(module(X), wanted) and torch.equal(module(X[:1]), wanted[:1]) and len(tried) == 1
    (notice,) = compiler.notices
    assert notice.startswith("warning: the VAE cannot be compiled, so --compile does nothing for it: ")
    assert "beyond the first line" not in notice


def test_an_error_of_the_model_is_its_own(graphs):
    module, compiler = nn.Linear(3, 4), Compiler(wanted=True)
    compiler.apply(module, "the VAE")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        module(torch.zeros(2, 5))
    assert not compiler.notices


def test_too_little_memory_is_no_reason_to_give_up_compiling(monkeypatch):
    def full(graph, _examples):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def compiled(forward, **_):
        return lambda *given: full(*given, None)

    monkeypatch.setattr(torch, "compile", compiled)
    module, compiler = nn.Linear(3, 4), Compiler(wanted=True)
    compiler.apply(module, "the VAE")
    with pytest.raises(torch.OutOfMemoryError):
        module(X)
    assert not compiler.notices


def test_what_was_compiled_can_be_released(graphs):
    module, compiler = nn.Linear(3, 4), Compiler(wanted=True)
    compiler.apply(module, "the VAE")
    module(X)
    weight = weakref.ref(module.weight)
    del module
    graphs.clear()
    gc.collect()
    compiler.release(torch.device("cpu"))
    assert weight() is None


def test_layers_that_lie_elsewhere_are_not_compiled():
    assert is_whole(nn.Linear(3, 4), torch.device("cpu")) and not is_whole(nn.Linear(3, 4), torch.device("cuda"))


@pytest.mark.slow
def test_latents_of_several_sizes(tiny_model, graphs):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8)
    plain, compiled = (VaeEncoder(tiny_model, device="cpu", compute="float32", dtype="float32", compiled=compiled)
                       for compiled in (False, True))
    assert len(graphs) == 1, "with the picture that a VAE is tested with"
    for given in (pixels, pixels[:1], pixels[:, :, :64], pixels[:2]):
        for row, wanted in zip(compiled.encode(given), plain.encode(given), strict=True):
            np.testing.assert_allclose(row["latent"], wanted["latent"], rtol=1e-5, atol=1e-5)
    assert len(graphs) > 1 and not compiled.compiler.notices


@pytest.mark.slow
@pytest.mark.parametrize("build", ["zimage", "sd3"])
def test_text_of_one_encoder_and_of_several(build, tmp_path, graphs):
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    tiny_pipelines.save(build, tmp_path / "model")
    captions = ["two dogs on a bench", "a cat"]
    rows = []
    for compiled in (False, True):
        encoder = TextEncoder(tmp_path / "model", FAMILIES[build], TextOptions(max_length=64), device="cpu",
                              compute="float32", dtype="float32", compiled=compiled, first=[(captions, False)])
        rows.append([*encoder.encode(captions), encoder.unconditional()])
    assert graphs and not encoder.compiler.notices
    for row, wanted in zip(*rows, strict=True):
        for name, values in row.items():
            np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-5)


def test_the_command_says_once_what_was_not_compiled(prep, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", failing)
    draw(tmp_path / "photos" / "0.png", (64, 64), seed=0).with_suffix(".txt").write_text("a cat")
    words = ("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
             tmp_path / "m.json", "--resolution", 64, "--step", 32, "--device", "cpu", "--json")
    result = prep(*words, "--compile")
    assert result.code == 0 and result.json["encoded"] == {"latent": 1, "mask": 0, "text": 2}, result.err
    for what in ("the VAE", "the text encoder"):
        assert result.err.count(f"warning: {what} cannot be compiled, so --compile does nothing for it: ") == 1
    assert not any(prep(*words).json["encoded"].values()), "keys are the same without it"
