"""One function picks the device for every command. CUDA is played: what is asked of it is what counts."""

from __future__ import annotations

import pytest
import torch

from prep.errors import UsageError
from prep.models.tensors import device_names, pick_device

CPU_BUILD = "this build of torch has no CUDA; install the build for your GPU: see pytorch.org"
LEAVE = "omit --device to use the best device available"


@pytest.fixture
def machine(monkeypatch):
    """`machine(cuda=2)`: a machine with these devices; the list is which CUDA devices were made the current one."""
    done: list[str] = []

    def make(cuda: int = 0, mps: bool = False, xpu: int = 0, built: str | None = "12.8") -> list[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "set_device", lambda one: done.append(str(one)))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)
        monkeypatch.setattr(torch.version, "cuda", built)
        return done

    return make


@pytest.mark.parametrize("name", [None, "auto"])
@pytest.mark.parametrize(("has", "best"), [({"cuda": 1, "mps": True}, "cuda"), ({"mps": True}, "mps"),
                                           ({"xpu": 1}, "xpu"), ({}, "cpu")])
def test_the_best_device_there_is(machine, name, has, best):
    done = machine(**has)
    assert pick_device(name) == torch.device(best) and not done


def test_the_second_gpu_is_the_one_that_everything_uses(machine):
    done = machine(cuda=2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert done == ["cuda:1"]


def test_all_is_every_gpu(machine):
    done = machine(cuda=3)
    assert device_names("all") == ("cuda:0", "cuda:1", "cuda:2")
    assert device_names("cuda:2,cpu") == ("cuda:2", "cpu")
    assert not done, "only the process that uses it makes it current"
    machine()
    with pytest.raises(UsageError, match=r"^--device is 'all', which is every CUDA GPU, but torch finds none$"):
        device_names("all")
    with pytest.raises(UsageError, match=r"^--device is 'cuda:1', but"):
        device_names("cpu,cuda:1")


@pytest.mark.parametrize(("has", "name", "found", "hint"), [
    ({"cuda": 2}, "cuda:2", "cpu, cuda:0, cuda:1", LEAVE), ({}, "mps", "cpu", LEAVE), ({}, "cuda", "cpu", LEAVE),
    ({"mps": True}, "mps:1", "cpu, mps:0", LEAVE), ({}, "meta", "cpu", LEAVE),
    ({"built": None}, "cuda", "cpu", CPU_BUILD),
])
def test_a_device_that_is_not_there(machine, has, name, found, hint):
    machine(**has)
    with pytest.raises(UsageError) as error:
        pick_device(name)
    assert error.value.message == (f"--device is '{name}', but this machine has no such device: torch finds {found}")
    assert error.value.hint == hint


def test_a_device_that_is_none(machine):
    machine()
    with pytest.raises(UsageError) as error:
        pick_device("toaster")
    assert error.value.message == "--device is 'toaster', expected auto, cpu, cuda, cuda:N or mps: torch finds cpu"
    assert error.value.hint == LEAVE


@pytest.mark.parametrize(("word", "meant"), [("gpu", "cuda"), ("GPU:1", "cuda:1"), ("CUDA", "cuda"), ("rocm", "cuda"),
                                              ("gpu:one", "cuda")])
def test_a_word_for_a_gpu(machine, word, meant):
    machine(cuda=2)
    with pytest.raises(UsageError, match=f"^--device is '{word}', expected") as error:
        pick_device(word)
    assert error.value.hint == f"a GPU of NVIDIA or AMD is --device {meant}"
