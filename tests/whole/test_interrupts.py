"""Ctrl-C ends a command within seconds, also while a library computes: Python raises nothing until that returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

# A function that does not return for a minute, and lets other threads run meanwhile, as torch's do.
SLOW = """
import hashlib, importlib, sys

def slow(*_, **__):
    print("slow", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 28)
"""
COMMAND = SLOW + """
from {app}.cli.main import app
from prep.cli.console import run

module, _, names = {what!r}.partition(":")
owner = importlib.import_module(module)
*path, last = names.split(".")
for name in path:
    owner = getattr(owner, name)
setattr(owner, last, slow)
run(app, {app!r}, sys.argv[1:])
"""
FAKE = SLOW + """
import typer
from contextlib import suppress
from prep.cli.console import run
from prep.runtime import defer_interrupts, killable

app = typer.Typer()

@app.command()
def go(as_json: bool = typer.Option(False, "--json")):
    {body}

run(app, "prep", sys.argv[1:])
"""
SAID = "interrupted; finished work is kept. Run the same command again to continue\n"
SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu")


def interrupted(script, *words):
    """Exit code, stdout, what stderr has after "slow", and the seconds that the command took to end."""
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, words)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    while (line := process.stderr.readline()) != "slow\n":
        assert line, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    since = time.monotonic()
    out, err = process.communicate(timeout=60)
    took = time.monotonic() - since
    with pytest.raises(ProcessLookupError):
        while time.monotonic() - since < 30:  # its workers see that it is gone
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    return process.returncode, out, err, took


@pytest.mark.few("with defer_interrupts(), killable(): slow()")
@pytest.mark.parametrize("body", ["with killable(): slow()", "with killable(), killable(): slow()",
                                  "with defer_interrupts(): slow()", "with defer_interrupts(), killable(): slow()"])
def test_a_function_that_does_not_return(body):
    code, out, err, took = interrupted(FAKE.format(body=body), "--json")
    assert (code, err) == (130, SAID) and took < 10
    assert json.loads(out)["error"] == {"message": SAID.partition(".")[0], "hint": "run the same command again to "
                                        "continue", "exit_code": 130, "kind": "interrupted"}


QUICK = SLOW.replace("1 << 28", "1 << 19")  # some tenths of a second


@pytest.mark.parametrize("body", ["with killable(): slow()", "with defer_interrupts(): slow()"])
def test_one_that_returns_is_tidied_up_after(body):
    tidied = f"try:\n        {body}\n    finally:\n        print('tidied')"
    code, out, err, _ = interrupted(FAKE.format(body=tidied).replace(SLOW, QUICK))
    assert (code, out, err) == (130, "tidied\n", SAID)


SPARED = SLOW.replace("1 << 28", "1 << 22") + """
import signal
from contextlib import nullcontext, suppress
from prep import runtime

runtime.PATIENCE = 0.01
signal.signal(signal.SIGINT, {handler})
with suppress(KeyboardInterrupt), {where}, runtime.killable():
    slow()
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("handler", "where"), [
    ("signal.default_int_handler", "nullcontext()"),  # a program that calls `prep`
    ("lambda *_: None", "runtime.command_says(print)")])  # as in a run, where Ctrl-C asks for a checkpoint
def test_what_is_not_ours_to_end(handler, where):
    assert interrupted(SPARED.format(handler=handler, where=where))[:3] == (0, "went on\n", "")


def encoding(photos, tiny_model, tmp_path):
    return ("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *SMALL)


def training(make, tmp_path, *more):
    return ("run", make().path, "-o", tmp_path / "run", "--steps", 1, "--set", "lora.rank=2", "--device", "cpu", *more)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["torch.nn:Conv2d.forward", "torch.nn:Embedding.forward",
                                  "diffusers:AutoencoderKL.encode"])
def test_encoders(photos, tiny_model, tmp_path, what):
    code, _, err, took = interrupted(COMMAND.format(app="prep", what=what), *encoding(photos, tiny_model, tmp_path))
    assert code == 130 and err.endswith(SAID) and "Traceback" not in err and took < 10


@pytest.mark.slow
@pytest.mark.parametrize("what", [
    "train.models.quantized:quantized", pytest.param("prep.models.checkpoints.streaming:_put", marks=pytest.mark.slow),
    pytest.param("torch:Tensor.backward", marks=pytest.mark.slow)])
def test_a_run_that_begins(make, tmp_path, what):
    """While it reads weights or quantizes them, and in the backward pass that tries the largest bucket."""
    code, _, err, took = interrupted(COMMAND.format(app="train", what=what), *training(
        make, tmp_path, *("--set", "quantization=fp8") * ("quantized" in what)))
    assert code == 130 and err.splitlines()[-1].startswith("interrupted; finished work is kept"), err
    assert "Traceback" not in err and took < 10
