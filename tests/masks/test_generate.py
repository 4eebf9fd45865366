"""Making masks: threads, batches for a model, what is combined with what, and what an interrupted run leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image
from walking import walk

from prep.errors import PathError
from prep.masks.generate import make_masks
from prep.masks.methods import MaskOptions
from prep.sources.item import Item

SIZES = [(40, 30), (30, 40), (32, 32), (64, 16), (40, 30), (50, 50), (41, 31)]


class Halves:
    """A model that finds the left half of every picture; it remembers what it was given."""

    def __init__(self, stop_at=None):
        self.batches, self.stop_at, self.threads = [], stop_at, set()

    def prepare(self, picture):
        return picture.shape

    def maps(self, inputs):
        self.threads.add(threading.get_ident())
        if len(self.batches) == self.stop_at:
            raise KeyboardInterrupt
        self.batches.append(list(inputs))
        return [np.array([[255, 0]], np.uint8).repeat(shape[0], 0).repeat(shape[1] // 2, 1) for shape in inputs]


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (number, 0, 0)).save(tmp_path / "in" / ("sub" if number > 4 else "") / f"{number}.png")
    return tmp_path / "in"


def make(root, out, model=None, mask_from="none", jobs=3, batch_size=3, **choice):
    items = [one for one in walk(root, source=0, mask_from=mask_from) if isinstance(one, Item)]
    asked = {"method": "clipseg", "prompts": ("left",)} if model is not None else {"method": "threshold"}
    return make_masks(items, MaskOptions(**{**asked, **choice}), out=out, load=lambda: model, jobs=jobs,
                      batch_size=batch_size)


def read(path):
    with Image.open(path) as picture:
        return np.asarray(picture)


def files(out):
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def left_half(size):
    mask = np.zeros(size[::-1], np.uint8)
    mask[:, :size[0] // 2] = 255
    return mask


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_every_picture_gets_the_models_map_at_its_own_size(pictures, tmp_path, jobs, batch_size):
    model = Halves()
    made = make(pictures, tmp_path / "out", model, jobs=jobs, batch_size=batch_size)
    assert (made.written, made.kept, made.skipped, made.findings, made.black) == (7, 0, 0, (), ())
    assert [len(batch) for batch in model.batches] == {1: [1] * 7, 3: [3, 3, 1], 100: [7]}[batch_size]
    assert [shape for batch in model.batches for shape in batch] == [(*size[::-1], 3) for size in SIZES]
    assert model.threads == {threading.get_ident()}
    for number, size in enumerate(SIZES):
        if size[0] % 2 == 0:
            mask = read(tmp_path / "out" / ("sub" if number > 4 else "") / f"{number}-masklabel.png")
            assert (mask == left_half(size)).all()


def test_a_run_goes_on_where_it_was_interrupted(pictures, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        make(pictures, out, Halves(stop_at=1))
    there = files(out)
    assert len(there) == 3 and all(name.endswith("-masklabel.png") for name in there)
    model = Halves()
    made = make(pictures, out, model)
    assert (made.written, made.kept) == (4, 3) and sum(map(len, model.batches)) == 4
    assert there.items() <= files(out).items() and len(files(out)) == 7
    make(pictures, tmp_path / "whole", Halves())
    assert files(out) == files(tmp_path / "whole")


def test_a_model_that_nothing_needs_is_not_loaded(pictures, tmp_path):
    make(pictures, tmp_path / "out", Halves())

    def load():
        raise AssertionError("loaded")

    items = [one for one in walk(pictures, source=0, mask_from="none") if isinstance(one, Item)]
    choice = MaskOptions(method="clipseg", prompts=("left",))
    assert make_masks(items, choice, out=tmp_path / "out", load=load).kept == 7
    owned = [one for one in walk(pictures, source=0, mask_from=tmp_path / "out") if isinstance(one, Item)]
    assert make_masks(owned, choice, out=tmp_path / "copies", load=load).written == 7
    assert files(tmp_path / "copies") == files(tmp_path / "out")


def test_a_disk_that_takes_nothing_ends_the_run(pictures, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("prep.masks.picture.write_atomic", full)
    with pytest.raises(PathError, match=r"cannot write mask .*0-masklabel\.png: No space left on device"):
        make(pictures, tmp_path / "out", Halves())


def test_bad_pictures_do_not_hold_up_a_batch(pictures, tmp_path):
    (pictures / "1.png").write_bytes((pictures / "1.png").read_bytes()[:60])
    (pictures / "3.png").write_bytes(b"")
    model = Halves()
    made = make(pictures, tmp_path / "out", model)
    assert [(one.path, one.code) for one in made.findings] == [("1.png", "truncated"), ("3.png", "empty-file")]
    assert made.written == 5 and [len(batch) for batch in model.batches] == [3, 2]


def test_pictures_too_large_for_memory_are_findings(pictures, tmp_path, monkeypatch):
    def huge(data, alpha):
        raise MemoryError

    monkeypatch.setattr("prep.masks.picture.decode_picture", huge)
    made = make(pictures, tmp_path / "out", Halves())
    assert {one.code for one in made.findings} == {"too-large"} and len(made.findings) == 7


def test_black_masks_are_written_and_named(pictures, tmp_path):
    made = make(pictures, tmp_path / "out", threshold=0.9)
    assert made.written == 7 and made.black == tuple(f"{'sub/' if n > 4 else ''}{n}.png" for n in range(7))


def test_a_picture_without_a_mask_does_not_get_that_of_another_directory(tmp_path):
    """Masks that lie flat are found by the name alone, so where one lies there, white is written, too."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    Image.new("LA", (8, 8), (0, 10)).save(tmp_path / "in" / "a.png")
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 12)).save(tmp_path / "in" / "sub" / name)
    made = make(tmp_path / "in", tmp_path / "out", method="alpha")
    assert (made.written, made.skipped) == (2, 1)
    assert read(tmp_path / "out" / "sub" / "a-masklabel.png").tolist() == [[255] * 16] * 12
    masked = [one for one in walk(tmp_path / "in", source=0, mask_from=tmp_path / "out") if isinstance(one, Item)]
    assert [one.mask and one.mask.file for one in masked] == [
        str(tmp_path / "out" / name) for name in ("a-masklabel.png", "sub/a-masklabel.png")] + [None]
    again = make(tmp_path / "in", tmp_path / "out", method="alpha")
    assert (again.written, again.kept, again.skipped) == (0, 2, 1)


# Combining.

@pytest.fixture
def owned(pictures):
    """Picture 0 has a mask of its own, at half its size: its lower half is 200, the rest 40."""
    mask = np.full((15, 20), 40, np.uint8)
    mask[8:] = 200
    Image.fromarray(mask).save(pictures / "0-masklabel.png")
    return pictures


@pytest.mark.parametrize(("how", "wanted"), [
    ("replace", [[255, 0], [255, 0]]), ("add", [[255, 40], [255, 200]]), ("subtract", [[0, 40], [0, 200]]),
    ("intersect", [[40, 0], [200, 0]])])
def test_masks_of_ones_own_are_combined(owned, tmp_path, how, wanted):
    make(owned, tmp_path / "out", Halves(), mask_from="sidecar", combine=how)
    found = read(tmp_path / "out" / "0-masklabel.png")
    assert found.shape == (30, 40)
    assert [[found[y, x] for x in (5, 35)] for y in (4, 26)] == wanted
    other = read(tmp_path / "out" / "1-masklabel.png")  # it has none: all of it trained
    assert (other == (255 - left_half(SIZES[1]) if how == "subtract" else left_half(SIZES[1]))).all()


def test_without_combine_ones_own_is_taken_over_as_it_is(owned, tmp_path):
    make(owned, tmp_path / "out", Halves(), mask_from="sidecar")
    assert (read(tmp_path / "out" / "0-masklabel.png") == read(owned / "0-masklabel.png")).all()
    make(owned, tmp_path / "kohya", Halves(), mask_from="sidecar", naming="kohya")
    assert read(tmp_path / "kohya" / "0.png").shape == (30, 40)  # which kohya asks for


def test_files_that_are_there_are_combined_and_count_before_ones_own(owned, tmp_path):
    out = tmp_path / "out"
    make(owned, out, Halves())
    make(owned, out, method="color", color="black", tolerance=2, combine="add", mask_from="sidecar")
    assert (read(out / "0-masklabel.png") == left_half(SIZES[0])).all()  # nothing in it but black
    assert (read(out / "4-masklabel.png") == 255).all()  # written, since the file would say something else
    again = make(owned, out, method="color", color="black", tolerance=2, combine="add", mask_from="sidecar")
    assert again.written == 7
    make(owned, out, method="color", color="black", combine="replace")
    assert not read(out / "0-masklabel.png").any()


def test_a_mask_of_another_shape_is_not_combined(pictures, tmp_path):
    (tmp_path / "out").mkdir()
    Image.new("L", (10, 10)).save(tmp_path / "out" / "0-masklabel.png")
    made = make(pictures, tmp_path / "out", Halves(), combine="add")
    assert [(one.path, one.code) for one in made.findings] == [("0.png", "mask-size-mismatch")]
    assert made.written == 6 and read(tmp_path / "out" / "0-masklabel.png").shape == (10, 10)
