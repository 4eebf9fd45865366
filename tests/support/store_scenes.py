"""What a store must do for Latentry, as a test of any kind of store asks it: the whole way from pictures to a run."""

from __future__ import annotations

import json

from pictures import draw, draw_mask

from prep.fs.remote.objects import create_object, list_objects, read_listed, read_object, read_range, replace_object

RUN = ("--batch-size", 2, "--precision", "fp32", "--device", "cpu", "--quiet", "--set", "checkpoint.every=2", "--set",
       "optimizer.name=adamw", "--set", "lora.rank=2", "--set", "sample.every=0")


def objects(url):
    """Whole objects, parts of them, conditional creation, listings."""
    plain = f"{url}/a b/ü+%41.bin"
    replace_object(plain, b"0123456789")
    assert read_object(plain, 10) == b"0123456789" and read_range(plain, 3, 6) == b"345"
    assert read_listed(plain, 10, 3, 3)[0] == b"345"
    replace_object(plain, b"9876543210")
    assert read_object(plain, 10) == b"9876543210"
    assert create_object(f"{url}/once", b"1") and not create_object(f"{url}/once", b"2")
    assert read_object(f"{url}/once", 1) == b"1"
    assert sorted(list_objects(url)) == ["a b/ü+%41.bin", "once"]


def whole_way(url, prep, train, model, tmp_path, monkeypatch):
    """Pictures in the store are encoded into it by parts, with the tables of a disk; the cache is maintained, copied
    and compared; and a run that is kept there is continued by another computer."""
    photos = tmp_path / "photos"
    for number, folder in enumerate(("cats/a", "cats/b/c", "", "dogs")):  # some directories have no files of their own
        draw(photos / folder / f"{number}.png", (96 + number, 96), seed=number).with_suffix(".txt").write_text("a b")
    draw_mask(photos / "cats/a/0-masklabel.png", (96, 96))
    for path in photos.rglob("*"):
        if path.is_file():
            replace_object(f"{url}/photos/{path.relative_to(photos).as_posix()}", path.read_bytes())
    here, there, cache = tmp_path / "m.json", f"{url}/data/m.json", f"{url}/data/cache"
    common = ("--model", model, "--resolution", 96, "--step", 16)
    given = (f"{url}/photos", "--cache", cache, "-o", there, *common)
    for words in (("encode", photos, "--cache", tmp_path / "cache", "-o", here, *common),
                  ("encode", *given, "--part", "0/2"), ("encode", *given, "--part", "1/2"),
                  ("seal", *given, "--parts", 2), ("encode", *given), ("verify", there), ("verify", there, "--quick")):
        done = prep(*words)
        assert done.code == 0, (words, done.err)
    assert json.loads(read_object(there, 1 << 20))["tables"] == json.loads(here.read_bytes())["tables"]
    for words in (("diff", here, there), ("compact", cache), ("encode", *given), ("gc", cache, "--keep", there),
                  ("push", here, f"{url}/pushed"), ("pull", f"{url}/pushed/m.json", tmp_path / "back"),
                  ("verify", tmp_path / "back" / "m.json")):
        done = prep(*words)
        assert done.code == 0, (words, done.err)
    continued_run(there, f"{url}/runs/cat", train, model, tmp_path, monkeypatch)


def continued_run(manifest, run, train, model, tmp_path, monkeypatch):
    """A run at the URL `run` is not begun twice, and continued by another computer with the result of one here."""
    whole, begun = (train("run", manifest, "--model", model, "-o", where, "--steps", steps, *RUN)
                    for where, steps in ((tmp_path / "cat", 4), (run, 2)))
    assert whole.code == begun.code == 0, whole.err + begun.err
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "another"))
    told = train("run", manifest, "--model", model, "-o", run, "--steps", 2, *RUN)
    assert told.code == 5 and f"error: {run} already holds a run" in told.err
    told = train("run", manifest, "--model", model, "-o", run, "--resume", "--steps", 4, *RUN)
    assert told.code == 0, told.err
    assert read_object(f"{run}/lora.safetensors", 1 << 24) == (tmp_path / "cat" / "lora.safetensors").read_bytes()
