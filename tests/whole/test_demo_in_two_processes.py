"""The demo, trained as users of several devices do: two processes, a prompt file edited meanwhile, a kill, and a resume
with one process. In the end the model draws red hearts, which were new to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from runs import events
from torchrun import command, environment

from prep.demo import write_demo
from prep.demo.drawing import draw_picture
from prep.demo.vocabulary import SHAPES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]
NEW = "a photo of a red heart"  # without a row in the cache
SEEDS = 8


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(root)
    return root


def words(demo):
    return ("run", demo / "demo.json", "-c", demo / "train.toml", "-o", demo / "run", "--device", "cpu",
            "--set", "checkpoint.every=100", "--set", "sample.every=100")


def last_step(run):
    return max((event["step"] for event in events(run)), default=0) if (run / "log.jsonl").exists() else 0


def until(true, process, seconds=400):
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience and process.poll() is None
        time.sleep(0.5)


def kill(torchrun):
    """Kills the processes that torchrun has started, which are no group of its own, and torchrun."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for process in (*map(int, children), torchrun):
        os.kill(process, signal.SIGKILL)


def red(picture):
    """The reddest shape of a picture, cropped to its bounding box and scaled to 32x32; `None` if nothing is red."""
    pixels = np.asarray(picture, np.float32)
    mask = (pixels[..., 0] > 140) & (pixels[..., 1:].max(-1) < 0.55 * pixels[..., 0])
    return boxed(mask)


def boxed(mask):
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if len(rows) < 12 or len(columns) < 12:
        return None
    cut = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.asarray(Image.fromarray(cut.astype(np.uint8) * 255).resize((32, 32), Image.Resampling.BOX)) > 127


def shape_of(picture):
    """The name of the shape that the red of a picture has most of its pixels in common with."""
    found = red(picture)
    if found is None:
        return None

    def agreement(shape):
        drawn = [boxed(np.asarray(draw_picture(shape=shape, color="red", ground="cloudy", size=(96, 96), seed=seed)[1])
                       > 127) for seed in range(12)]
        return max((found & one).sum() / (found | one).sum() for one in drawn)

    return max(SHAPES, key=agreement)


def size_of(path):
    with Image.open(path) as picture:
        return picture.size


def hearts(demo, lora):
    """How many of `SEEDS` pictures of a red heart show one, with the LoRA or without."""
    pipeline = StableDiffusionPipeline.from_pretrained(demo / "model", low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    if lora:
        pipeline.load_lora_weights(str(demo / "run" / "lora.safetensors"))
    shapes = [shape_of(pipeline("a red heart on a striped ground", width=96, height=96, guidance_scale=4.0,
                                num_inference_steps=25, generator=torch.Generator().manual_seed(seed)).images[0])
              for seed in range(SEEDS)]
    return shapes.count("heart")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_judge_knows_the_shapes(shape):
    """A shape at another size, place and turn than those it compares with."""
    for seed in range(100, 106):
        picture, _ = draw_picture(shape=shape, color="red", ground="striped", size=(96, 96), seed=seed)
        assert shape_of(picture) == shape


def test_red_hearts_are_learned(demo, prep):
    run = demo / "run"
    assert prep("encode", demo / "dataset.toml", "--cache", demo / "cache", "-o", demo / "demo.json", "--device", "cpu",
                "--quiet").code == 0
    with subprocess.Popen(command(2, *words(demo)), env=environment(), stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as torchrun:
        try:
            until(lambda: last_step(run) > 20, torchrun)
            (demo / "prompts.txt").write_text(f"{NEW}\n")
            until(lambda: last_step(run) > 230, torchrun)
        finally:
            kill(torchrun.pid)
    assert events(run)[0]["ranks"] == 2 and not (run / "lora.safetensors").exists()
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-000100", "step-000200"}
    done = subprocess.run([sys.executable, "-m", "train", *map(str, words(demo)), "--resume"], env=environment(),
                          check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = events(run)
    assert [event["step"] for event in log if event["event"] == "step"] == list(range(1, 1201))
    assert [event["ranks"] for event in log if event["event"] == "start"] == [2, 1]
    assert not [event["text"] for event in log if event["event"] == "warning"]
    assert len(list((run / "prompts").glob("*.safetensors"))) == 1, "the new prompt was encoded beside the run"
    sizes = [size_of(run / "samples" / f"step-{step:06d}.png") for step in (0, 100, 200, 1200)]
    assert sizes[0] > sizes[1] == sizes[2] == sizes[3], "four prompts, then one"
    losses = [event["loss"] for event in log if event["event"] == "validation"]
    assert losses[-1] < losses[0]
    before, after = hearts(demo, lora=False), hearts(demo, lora=True)
    assert before == 0 and after >= SEEDS // 2
