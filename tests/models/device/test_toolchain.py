"""What torch.compile would lack is told by torch's own search, before a model is compiled."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from prep.models.device import toolchain


@pytest.mark.parametrize(("kind", "place", "told"), [
    ("cpu", "get_cpp_compiler", "no compiler in PATH"), ("cuda", "triton_backend", "Failed to find C compiler")])
def test_a_compiler_that_is_missing_is_found_by_the_search_of_torch(monkeypatch, kind, place, told):
    monkeypatch.setattr(toolchain, "has_triton", lambda: True)
    monkeypatch.setattr(toolchain, place, lambda: "it")
    assert toolchain.missing_compiler(torch.device(kind)) is None
    monkeypatch.setattr(toolchain, place, Mock(side_effect=RuntimeError(told)))
    assert str(toolchain.missing_compiler(torch.device(kind))) == told


@pytest.mark.parametrize(("major", "told"), [(9, "Cannot find a working triton"), (6, "too old")])
def test_triton_that_is_missing(monkeypatch, major, told):
    monkeypatch.setattr(toolchain, "has_triton", lambda: False)
    facts = SimpleNamespace(major=major, minor=0, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert told in str(toolchain.missing_compiler(torch.device("cuda")))
