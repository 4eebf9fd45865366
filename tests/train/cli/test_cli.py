"""The commands as one types them: exit codes, streams, JSON, files."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from pictures import draw
from PIL import Image

SMALL = ("--device", "cpu", "--set", "lora.rank=2", "--set", "sample.steps=2", "--set", "sample.size=[64, 64]")


def run(train, made, *options, steps=3):
    return train("run", made.path, "-o", made.root / "run", "--steps", steps, *SMALL, *options)


def test_check_says_what_would_be_trained(train, make):
    path = make().path
    result = train("check", path, "--batch-size", 2, "--steps", 8)
    assert result.code == 0 and result.err == ""
    what, on, *plan = result.out.splitlines()
    assert what.startswith("a LoRA of rank 16 on ") and what.endswith("tiny (sd15, epsilon)")
    assert on == ("7 training samples and 2 validation samples in 2 buckets: "
                  "latent bfloat16, mask uint8 for 6 of 9 (not used: loss.masked is off), text bfloat16")
    assert plan == ["7 samples per epoch, in 4 steps of up to 2 samples, micro-batches of up to 2",
                    "8 steps = 2.0 epochs; ready to train"]
    result = train("check", path, "--method", "full", "--masked", "--batch-size", 2, "--underfill", "drop")
    assert result.out.startswith("every weight of ") and "mask uint8 for 6 of 9, text" in result.out
    assert "\nleft out: 80/" in result.out


def test_check_says_how_many_masks_are_black_everywhere(prep, train, tiny_model, tmp_path):
    for number in range(3):
        draw(tmp_path / "photos" / f"{number}.png", (96, 96), seed=number).with_suffix(".txt").write_text("a thing")
        if number:
            Image.new("L", (96, 96), 255 * (number - 1)).save(tmp_path / "photos" / f"{number}-masklabel.png")
    prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
         "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--mask", "sidecar")
    result = train("check", tmp_path / "m.json", "--masked")
    assert "mask uint8 for 2 of 3, 1 of them entirely black, text" in result.out, result.err


def test_check_reports_as_json(train, make):
    result = train("check", make().path, "--batch-size", 2, "--underfill", "repeat", "--json")
    assert result.code == 0
    assert result.json == {"format": "latentry/check", "version": 1, "ok": True, "faults": [],
                           "steps_per_epoch": 4, "left_out": [], "repeated": result.json["repeated"]}
    assert len(result.json["repeated"]) == 1 and result.json["repeated"][0].startswith("80/")


def test_check_ends_with_the_first_fault_s_code(train, make, tmp_path):
    path = make(masks=False).path
    result = train("check", path, "--masked", "--batch-size", 64, "--underfill", "drop")
    assert result.code == 7
    assert result.err.startswith("error: manifest has no field 'mask', and the settings ask for masked loss\nhint: ")
    assert "leaves out all 7 samples" in result.err
    result = train("check", path, "--masked", "--json")
    assert result.code == 7 and result.err == "" and not result.json["ok"]
    assert result.json["faults"][0]["what"].startswith("manifest has no field 'mask'")


@pytest.mark.parametrize(("options", "code", "said"), [
    (["--set", "lora.rnak=3"], 3, "did you mean 'rank'"),
    (["--set", "rank"], 3, "--set is 'rank', expected NAME=VALUE"),
    (["--steps", "3", "--epochs", "2"], 3, "steps is 3 and epochs is 2, expected one of them"),
    (["-c", "gone.toml"], 3, "cannot read gone.toml"),
    (["--model", "/nowhere"], 6, "/nowhere"),
    (["--batch-size", "64", "--underfill", "drop"], 8, "leaves out all 7 samples"),
    (["--no-such-option"], 2, "No such option"),
])
def test_faults_end_a_run_before_it_makes_a_directory(train, make, options, code, said):
    made = make()
    result = train("run", made.path, "-o", made.root / "run", *options)
    assert result.code == code and said in result.err and result.out == ""
    assert not (made.root / "run").exists()


def test_a_device_that_is_not_there_is_said(train, make):
    made = make()
    result = train("run", made.path, "-o", made.root / "run", "--device", "cuda:7")
    assert result.code == 2 and "--device is 'cuda:7', and this machine has no such device" in result.err
    result = train("run", made.path, "-o", made.root / "run", "--device", "toaster")
    assert result.code == 2 and "--device is 'toaster', expected auto, cpu, cuda, cuda:N or mps" in result.err
    assert not (made.root / "run").exists()


def test_run_says_its_result_on_stdout_and_everything_else_on_stderr(train, make):
    made = make()
    result = run(train, made)
    assert result.code == 0, result.err
    assert result.out == f"{made.root / 'run' / 'lora.safetensors'}\n"
    assert "trained parameters on cpu" in result.err and "step 3: validation loss" in result.err
    assert (made.root / "run" / "samples" / "step-000003.png").is_file()


def test_quiet_says_only_warnings(train, make):
    made = make()
    (made.root / "prompts.txt").write_text("a green dragon\n")
    result = run(train, made, "--quiet", "--json")
    assert result.code == 0 and result.json["event"] == "end"
    assert {line.partition(":")[0] for line in result.err.splitlines()} == {"warning"}
    assert "a green dragon" in result.err


def test_a_second_run_needs_resume_and_keeps_its_settings(train, make):
    made = make()
    assert run(train, made, "--lr", "0.01").code == 0
    again = run(train, made)
    assert again.code == 5 and "hint: --resume goes on with it" in again.err
    resumed = train("run", made.path, "-o", made.root / "run", "--resume", "--steps", 4)
    assert resumed.code == 0, resumed.err
    facts = json.loads((made.root / "run" / "run.json").read_text())["config"]
    assert facts["optimizer"]["lr"] == 0.01 and facts["lora"]["rank"] == 2 and facts["steps"] == 4
    other = run(train, made, "--resume", "--lr", "0.02")
    assert other.code == 3 and "optimizer.lr is 0.02, and the checkpoint was trained with 0.01" in other.err


def test_edited_prompts_never_end_a_run(train, make):
    """Gone from the start, and the pictures are still made."""
    made = make()
    (made.root / "prompts.txt").unlink()
    result = run(train, made)
    assert result.code == 0 and "the prompts of the manifest are used" in result.err
    assert (made.root / "run" / "samples" / "step-000003.png").is_file()


def test_sample_shows_before_and_after_side_by_side(train, make):
    made = make()
    assert run(train, made, "--lr", "0.05", steps=6).code == 0
    grid = made.root / "g.png"
    result = train("sample", made.root / "run", "--compare", "-o", grid, "--device", "cpu", "--quiet")
    assert result.code == 0 and result.out == f"{grid}\n", result.err
    pixels = np.asarray(Image.open(grid))
    assert pixels.shape == (2 * (192 + 14), 2 * 192, 3)  # 64 pixels shown three times as large
    before, after = pixels[14:206, :192], pixels[14:206, 192:]
    assert not np.array_equal(before, after)
    for option, wanted in (("--base", before), ("--checkpoint=step-000006", after)):
        assert train("sample", made.root / "run", option, "-o", grid, "--device", "cpu").code == 0
        assert np.array_equal(np.asarray(Image.open(grid))[14:206, :192], wanted)
    last = np.asarray(Image.open(made.root / "run" / "samples" / "step-000006.png"))
    assert np.array_equal(last[14:206, :192], after)


def test_sample_with_prompts_of_one_s_own(train, make):
    made = make()
    assert run(train, made).code == 0
    own = made.root / "own.txt"
    own.write_text("a red circle\nunheard of\n")
    result = train("sample", made.root / "run", "--prompts", own, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 0 and "warning: prompt 'unheard of'" in result.err
    own.write_text("unheard of\n")
    result = train("sample", made.root / "run", "--prompts", own, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 7 and "the cache has no text row of any prompt in" in result.err
    assert f"--prompts {own}" in result.err


def test_sample_of_what_is_no_run_or_has_no_checkpoint(train, make, tmp_path):
    assert train("sample", tmp_path / "nothing").code == 5
    made = make()
    assert run(train, made).code == 0
    result = train("sample", made.root / "run", "--checkpoint", "step-9", "-o", tmp_path / "g.png")
    assert result.code == 5 and "has no checkpoint 'step-9', expected one of: step-000003" in result.err


def test_a_manifest_without_prompts_says_so(train, make, tmp_path):
    made = make(prompts=None)
    assert run(train, made).code == 0
    result = train("sample", made.root / "run", "-o", tmp_path / "g.png")
    assert result.code == 7 and "the manifest has no sample prompts" in result.err


@pytest.mark.parametrize("command", [[], ["check"], ["run"], ["sample"]], ids=str)
def test_help_is_quick_and_loads_nothing_heavy(command):
    code = ("import sys; from train.cli.main import main; sys.argv = ['train', *sys.argv[1:], '--help']\n"
            "try: main()\nexcept SystemExit as end: assert not end.code\n"
            "assert not {'torch', 'diffusers', 'numpy', 'pyarrow', 'peft'} & set(sys.modules)")
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - begun < 3  # 0.15 s alone; this machine may be busy


def test_a_run_that_another_program_is_in_is_left_alone(train, make):
    from train.check import check
    from train.config.load import load_config
    from train.runs.directory import lock_run
    from train.setup import RunRequest

    made = make()
    setup = check(RunRequest(manifest=made.path), load_config(None, {})).setup
    with lock_run(made.root / "run", setup):
        result = run(train, made)
    assert result.code == 5 and "another program is training in" in result.err
    assert not list((made.root / "run").iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
@pytest.mark.parametrize("what", ["file", "readonly", "dangling"])
def test_a_directory_that_cannot_be_made_is_the_paths_matter(train, make, monkeypatch, what):
    """Also for a superuser, whom no mode stops."""
    made = make()
    place = made.root / "place"
    if what == "file":
        place.write_text("x")
    elif what == "dangling":
        place.symlink_to(made.root / "nowhere" / "at" / "all")
    else:
        monkeypatch.setattr("train.runs.directory.write_atomic", refuse)
    result = train("run", made.path, "-o", place if what == "dangling" else place / "run", *SMALL)
    assert result.code == 5 and result.err.startswith("error: ") and "Traceback" not in result.err


def refuse(path, data):
    raise PermissionError(13, "Permission denied", str(path))


def test_a_grid_never_lands_among_pictures_or_over_another_file(train, make):
    made = make()
    assert run(train, made).code == 0
    (made.root / "photos").mkdir()
    (made.root / "notes.txt").write_text("mine")
    for place, said in (("photos/grid.png", "lies inside pictures"), ("cache/grid.png", "lies inside cache"),
                        ("notes.txt", "exists and is no PNG picture, so it is not replaced"),
                        ("run", "is a directory, expected a file name")):
        result = train("sample", made.root / "run", "-o", made.root / place, "--device", "cpu")
        assert result.code == 5 and said in result.err, place
    assert (made.root / "notes.txt").read_text() == "mine" and not list((made.root / "photos").iterdir())
    for _ in range(2):  # into a new directory, and over the last one
        assert train("sample", made.root / "run", "-o", made.root / "new" / "g.png", "--device", "cpu").code == 0


def test_a_full_fine_tune_is_sampled_and_a_torn_checkpoint_is_said(train, make):
    made = make()
    assert run(train, made, "--method", "full", "--set", "checkpoint.every=2", steps=3).code == 0
    result = train("sample", made.root / "run", "--compare", "-o", made.root / "g.png", "--device", "cpu",
                   "--guidance", 1)
    assert result.code == 0, result.err
    last = made.root / "run" / "checkpoints" / "step-000003"
    torn = last / "unet" / "diffusion_pytorch_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    result = run(train, made, "--method", "full", "--resume", "--set", "checkpoint.every=2", steps=4)
    assert result.code == 7 and f"hint: remove {last}; --resume then goes on" in result.err
    for path in sorted(last.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    last.rmdir()
    assert run(train, made, "--method", "full", "--resume", "--set", "checkpoint.every=2", steps=4).code == 0
