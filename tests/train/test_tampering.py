"""Checkpoints that are not what a run wrote: each gives one clear error, and an untouched one goes on bit by bit.

Flipped bits, files of another checkpoint or run, an optimizer file without moments, a state with another step.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from runs import go
from safetensors.torch import load_file, save

from prep.errors import CacheError
from prep.runs.documents import with_checksum

SETTINGS = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 4,
            "lora": {"rank": 2}, "checkpoint": {"every": 2, "keep": 0}, "ema": {"decay": 0.9}}


@pytest.fixture
def pristine(make, setup_of, tmp_path):
    """What was made, a run of 4 steps with a checkpoint at 2 and 4, and another run with another seed."""
    made = make()
    go(setup_of(made, **SETTINGS, steps=4), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    go(setup_of(made, **SETTINGS, steps=4, seed=7), tmp_path / "other")
    return made


def flip(path):
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 201] ^= 8
    path.write_bytes(data)


def rewrite(path, change):
    data = path.read_bytes()
    meta = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")
    path.write_bytes(save(change({name: value.clone() for name, value in load_file(path).items()}), meta))


def in_state(folder, **values):
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=1, sort_keys=True) + "\n")


def without_first_parameter(moments):
    first = next(iter(moments)).partition("/")[2]
    return {name: value for name, value in moments.items() if name.partition("/")[2] != first}


def from_step_2(name):
    return lambda at: shutil.copy(at.parent / "step-000002" / name, at)


CASES = {
    "bit of the weights": lambda at: flip(at / "lora.safetensors"),
    "bit of the moments": lambda at: flip(at / "optimizer.safetensors"),
    "bit of the average": lambda at: flip(at / "ema.safetensors"),
    "no moments at all": lambda at: rewrite(at / "optimizer.safetensors", lambda _: {"x": torch.zeros(1)}),
    "a parameter's moments lack": lambda at: rewrite(at / "optimizer.safetensors", without_first_parameter),
    "one moment lacks": lambda at: rewrite(at / "optimizer.safetensors", lambda held: dict(list(held.items())[1:])),
    "moments of another shape": lambda at: rewrite(at / "optimizer.safetensors", lambda held: {
        name: torch.zeros(3, 5) if name.startswith("exp_avg/") else value for name, value in held.items()}),
    "weights of step 2": from_step_2("lora.safetensors"),
    "moments of step 2": from_step_2("optimizer.safetensors"),
    "average of step 2": from_step_2("ema.safetensors"),
    "weights of another run": lambda at: shutil.copy(
        at.parents[2] / "other" / "checkpoints" / "step-000004" / "lora.safetensors", at),
    "weights in half precision": lambda at: rewrite(at / "lora.safetensors", lambda held: {
        name: value.half() for name, value in held.items()}),
    "state says step 6": lambda at: in_state(at, step=6),
    "state says step 2": lambda at: in_state(at, step=2),
    "state says step -3": lambda at: in_state(at, step=-3),
    "state says step 1e400": lambda at: (at / "state.json").write_text(
        (at / "state.json").read_text().replace('"step": 4', '"step": 1e400')),
    "state of many brackets": lambda at: (at / "state.json").write_text("[" * 100_000),
    "state of step 2": from_step_2("state.json"),
    "all of step 2": lambda at: (shutil.rmtree(at), shutil.copytree(at.parent / "step-000002", at)),
    "weights are a link": lambda at: ((at / "lora.safetensors").rename(at.parents[1] / "w"),
                                      (at / "lora.safetensors").symlink_to(at.parents[1] / "w")),
}


def test_every_tampering_is_one_clear_error(pristine, setup_of, tmp_path):
    """And what was damaged is named, with the checkpoint that the run can go on from."""
    setup = setup_of(pristine, **SETTINGS, steps=6)
    for case, tamper in CASES.items():
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
        tamper(tmp_path / "run" / "checkpoints" / "step-000004")
        with pytest.raises(CacheError) as caught:
            go(setup, tmp_path / "run", resume=True)
        assert "step-000004" in caught.value.message and "\n" not in caught.value.message, case
        assert caught.value.hint == "--resume --from step-000002 continues from another checkpoint", case


@pytest.mark.slow
def test_an_untouched_checkpoint_and_an_older_one_end_with_the_same_weights(pristine, setup_of, tmp_path):
    setup = setup_of(pristine, **SETTINGS, steps=6)
    go(setup, tmp_path / "straight")
    go(setup, tmp_path / "run", resume=True)
    flip(tmp_path / "kept" / "checkpoints" / "step-000004" / "lora.safetensors")
    go(setup, tmp_path / "kept", resume=True, named="step-2")
    wanted = (tmp_path / "straight" / "lora.safetensors").read_bytes()
    assert (tmp_path / "run" / "lora.safetensors").read_bytes() == wanted
    assert (tmp_path / "kept" / "lora.safetensors").read_bytes() == wanted


def test_moments_are_compared_with_the_parameters_although_every_digest_is_right(pristine, setup_of, tmp_path):
    """Sealed again by somebody who knows how: names, shapes and dtypes are compared all the same."""
    setup = setup_of(pristine, **SETTINGS, steps=6)
    at = tmp_path / "run" / "checkpoints" / "step-000004"
    for change, said in (
        (lambda held: dict(list(held.items())[1:]), "is missing, expected shape"),
        (lambda _: {"x": torch.zeros(1)}, "optimizer.safetensors has no moments for any trained parameter"),
        (lambda held: {**held, "more": torch.zeros(1)}, "'more' is not a tensor of this run"),
        (lambda held: {name: torch.zeros(9) for name, value in held.items()}, "has shape ["),
    ):
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
        rewrite(at / "optimizer.safetensors", change)
        sealed_again(at)
        with pytest.raises(CacheError) as caught:
            go(setup, tmp_path / "run", resume=True)
        assert said in caught.value.message


def sealed_again(at):
    from prep.digest import digest_bytes

    body = json.loads((at / "state.json").read_text())
    body.pop("self")
    body["files"] = {name: {"bytes": (at / name).stat().st_size, "sha256": digest_bytes((at / name).read_bytes())}
                     for name in body["files"]}
    (at / "state.json").write_bytes(with_checksum(body))
