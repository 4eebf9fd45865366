"""bench_step.py: what it measures on which device, and where it waits for a GPU. It measures nothing here."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def step() -> Any:
    """The module, loaded from its file, which finds its neighbours there."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_step", HERE / "bench_step.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
        sys.modules.pop("results", None)
    return module


@pytest.mark.parametrize(("given", "found"), [
    ({"device": "cpu"}, [("demo", "lora", False)]),
    ({"device": "cuda"}, [("sd15", "lora", False), ("sd15", "full", True)]),
    ({"device": "cuda", "ema": True}, [("sd15", "lora", True)]),
    ({"device": "cuda", "method": "full"}, [("sd15", "full", False)]),
    ({"device": "cuda", "model": "demo"}, [("demo", "lora", False)]),
    ({"device": "cpu", "model": "sd15", "method": "full", "ema": True}, [("sd15", "full", True)])], ids=str)
def test_what_is_measured(step: Any, given: dict[str, Any], found: list[tuple[str, str, bool]]) -> None:
    options = argparse.Namespace(**{"model": None, "method": None, "ema": False, **given})
    cases = step.cases(options)
    assert [(case.model, case.method, case.ema) for case in cases] == found
    assert {case.device for case in cases} == {torch.device(given["device"])}
    assert {case.settings["precision"] for case in cases} == {"bf16" if given["device"] == "cuda" else "fp32"}
    assert [case.settings["ema"]["decay"] > 0 for case in cases] == [ema for *_, ema in found]


@pytest.mark.parametrize(("device", "waits"), [("cuda", 2), ("cpu", 0)])
def test_a_gpu_is_waited_for_at_the_ends_of_a_turn(step: Any, monkeypatch: pytest.MonkeyPatch, device: str,
                                                   waits: int) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    turns = step.Turns(3, step.Case(model="demo", method="lora", ema=False, device=torch.device(device)))
    turns.others({"bare loop": _steps(done)})
    assert done == ["wait"] * (waits // 2) + ["step"] * 3 + ["wait"] * (waits // 2)
    assert len(turns.taken["bare loop"]) == 1


def _steps(done: list[str]) -> Iterator[None]:
    while True:
        done.append("step")
        yield
