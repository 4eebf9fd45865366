"""Roles, repeats, masks and tars in exports with pictures: what sd-scripts and OneTrainer would train on."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from pictures import draw, draw_mask
from PIL import Image
from sd_scripts import read_config
from tarred import member, tar_of

from prep.errors import UsageError
from prep.export.kohya_config import Resolution
from prep.export.run import export
from prep.export.sample import Samples
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--quiet")
TRAIN, PRIOR, HELD = "[[source]]\npath = '10_sks dog'\nrepeats = 3\n", """[[source]]
path = 'people.tar'
role = 'prior'
""", "[[source]]\npath = 'held'\nrole = 'validation'\nrepeats = 5\n"


@pytest.fixture
def sets(tmp_path):
    """Training pictures, one of them in a directory below and one with two captions; others in a tar; held-out ones."""
    for number, name in enumerate(("a", "sub/a", "sub_a", "b")):
        draw(tmp_path / "10_sks dog" / f"{name}.png", (96, 96) if number % 2 else (144, 64), seed=number).with_suffix(
            ".txt").write_text(f"dog {number}\n")
    for name in ("x", "y", "z"):
        draw(tmp_path / "more" / f"{name}.png", (100, 96), seed=ord(name))
    pictures = {name: (tmp_path / "more" / f"{name}.png").read_bytes() for name in ("x", "y", "z")}
    (tmp_path / "people.tar").write_bytes(tar_of([one for name, data in pictures.items() for one in (
        member(f"{name}.png", data), member(f"{name}.txt", b"person"))]))
    draw(tmp_path / "held" / "a.png", (96, 96), seed=77).with_suffix(".txt").write_text("held")
    return tmp_path


@pytest.fixture
def encoded(prep, sets, tiny_model):
    """Encodes sources to a manifest."""
    def run(*sources, more=()):
        (sets / "r.toml").write_text("".join(sources))
        told = prep("encode", sets / "r.toml", "--model", tiny_model, "--cache", sets / "cache", "-o", sets / "m.json",
                    *SMALL, *more)
        assert told.code == 0, told.err
        return sets / "m.json"

    return run


def wanted(path):
    """How often an epoch shows each picture, by role and source and name."""
    return {(one.role, one.source, one.name): one.repeats for one in Samples(open_manifest(read_manifest(path)))}


def names_of(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix == ".png")


PICTURES = [f"train/3_sks dog/{name}.png" for name in ("a", "b", "sub_a-2", "sub_a")]


def test_roles_have_directories_of_their_own(encoded, sets, prep):
    path = encoded(TRAIN, PRIOR, HELD)
    told = prep("export", path, "--to", "kohya", "-o", sets / "out")
    assert told.code == 0 and "; 1 held-out sample left out, which --held-out writes" in told.out, told.err
    found = names_of(sets / "out")
    assert found == [f"regularization/4_people/people.tar_{one}.png" for one in "xyz"] + PICTURES
    assert (sets / "out" / found[0]).read_bytes() == (sets / "more" / "x.png").read_bytes()
    assert "other buckets" not in (sets / "out" / "dataset.toml").read_text()
    (dataset,) = read_config(sets / "out" / "dataset.toml")
    assert (dataset["resolution"], dataset["bucket_reso_steps"], dataset["bucket_no_upscale"]) == (96, 16, False)
    assert {name: shown[:2] for name, shown in dataset["shown"].items()} == {
        **{f"regularization/4_people/people.tar_{one}.png": (4, "person") for one in "xyz"},
        PICTURES[0]: (3, "dog 0"), PICTURES[1]: (3, "dog 3"), PICTURES[2]: (3, "dog 2"), PICTURES[3]: (3, "dog 1")}
    assert sum(wanted(path)[one] for one in wanted(path) if one[0] == "prior") == 12
    for to in ("kohya", "folder"):
        report = export(path, to, sets / f"all {to}", held_out=True)
        assert (report.samples, report.left_out) == (8, 0)
        assert "validation/1_held/a.png" in names_of(sets / f"all {to}")
    assert (sets / "all kohya" / "dataset.toml").read_bytes() == (sets / "out" / "dataset.toml").read_bytes()
    lines = (sets / "all folder" / "validation" / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["role"] for line in lines] == ["validation"]
    assert [json.loads(line)["repeats"] for line in (
        sets / "all folder" / "train" / "metadata.jsonl").read_text().splitlines()] == [3] * 4
    with pytest.raises(UsageError, match="--held-out is given with --to webdataset"):
        export(path, "webdataset", sets / "no", held_out=True)


@pytest.mark.parametrize("prior", [False, True])
def test_masks_are_as_their_readers_want_them(encoded, sets, prior):
    """sd-scripts has no masks of regularization pictures' datasets but those in its caches."""
    draw_mask(sets / "10_sks dog" / "a-masklabel.png", (144, 64))
    path = encoded(TRAIN, *([PRIOR] if prior else []))
    export(path, "folder", sets / "folder")
    masks = [name for name in names_of(sets / "folder") if name.endswith("-masklabel.png")]
    assert masks == ["train/3_sks dog/a-masklabel.png"]
    with Image.open(sets / "folder" / masks[0]) as mask, Image.open(sets / "10_sks dog" / "a-masklabel.png") as old:
        assert mask.mode == "L" and mask.size == (144, 64)
        assert np.abs(np.asarray(mask, np.float32) - np.asarray(old.convert("L"), np.float32)).mean() < 40
    export(path, "kohya", sets / "kohya")
    (dataset,) = read_config(sets / "kohya" / "dataset.toml")
    with np.load(sets / "kohya" / "train" / "3_sks dog" / "b_0096x0096_sd.npz") as arrays:
        assert ("alpha_mask" in arrays) == prior
    if prior:
        assert [one.get("alpha_mask", False) for one in dataset["subsets"]] == [True, False]
        return
    assert {name: mask for name, (_, _, mask) in dataset["shown"].items()} == {
        name: name.replace("train/", ".masks/") for name in PICTURES}
    with Image.open(sets / "kohya" / ".masks" / "3_sks dog" / "b.png") as mask:
        assert mask.size == (96, 96) and mask.getextrema() == (255, 255)
    assert (sets / "kohya" / ".masks" / "3_sks dog" / "a.png").read_bytes() == (sets / "folder" / masks[0]).read_bytes()


AROUND = frozenset({(1024, 1024), (512, 2048), (2048, 512)})


@pytest.mark.parametrize(("never_enlarged", "size", "bucket"), [
    (False, (3000, 2000), (1216, 832)), (False, (700, 500), (1216, 832)), (False, (1025, 1024), (1024, 1024)),
    (False, (4000, 900), (2048, 512)), (False, (1210, 1000), (1152, 896)),
    (True, (3000, 2000), (1216, 832)), (True, (700, 500), (640, 448)), (True, (4000, 900), (1984, 448)),
])
def test_the_bucket_that_sd_scripts_chooses(never_enlarged, size, bucket):
    """As its `BucketManager` did, asked for these."""
    resolution = Resolution(buckets=AROUND, no_upscale=never_enlarged)
    assert resolution.options()["bucket_reso_steps"] == 64 and resolution.chosen(size) == bucket


def test_what_sd_scripts_would_do_otherwise_is_said(encoded, sets):
    """A picture of 100 x 80 fits into 96 x 80, which is none of its buckets; its trainers take steps of 64 alone."""
    draw(sets / "10_sks dog" / "w.png", (100, 80), seed=9).with_suffix(".txt").write_text("dog")
    export(encoded(TRAIN), "kohya", sets / "out")
    text = (sets / "out" / "dataset.toml").read_text()
    assert "# sd-scripts trains this family with bucket_reso_steps of 64 or its multiples only, not 16: encode" in text
    assert "# sd-scripts would choose other buckets for 1 picture, like train/3_sks dog/w.png:\n# delete" in text


def test_several_captions_are_drawn_and_braces_kept(encoded, sets):
    (sets / "10_sks dog" / "b.txt").write_text("a {b} c\nanother\n")
    export(encoded(TRAIN), "kohya", sets / "out")
    (dataset,) = read_config(sets / "out" / "dataset.toml")
    assert dataset["subsets"][0]["enable_wildcard"] is True
    assert (sets / "out" / "train" / "3_sks dog" / "b.txt").read_text() == "a {{b}} c\nanother\n"


def test_formats_that_sd_scripts_passes_over_are_refused(encoded, sets):
    with Image.open(sets / "10_sks dog" / "b.png") as picture:
        picture.save(sets / "10_sks dog" / "c.gif")
        picture.convert("RGB").save(sets / "10_sks dog" / "d.jfif", "JPEG")
    for name in "cd":
        shutil.copy(sets / "10_sks dog" / "b.txt", sets / "10_sks dog" / f"{name}.txt")
    path = encoded(TRAIN)
    with pytest.raises(UsageError, match=r"formats that it does not read \(1\): c\.gif"):
        export(path, "kohya", sets / "out")
    assert not (sets / "out").exists()
    export(path, "folder", sets / "folder")
    assert (sets / "folder" / "train" / "3_sks dog" / "d.jpg").read_bytes() == (
        sets / "10_sks dog" / "d.jfif").read_bytes()


def test_all_samples_of_tars_have_the_same_members(encoded, sets):
    """`load_dataset("webdataset")` compares the first five, and fails later for others."""
    draw_mask(sets / "10_sks dog" / "a-masklabel.png", (144, 64))
    (sets / "10_sks dog" / "b.txt").write_text("one\ntwo\n")
    path = encoded(TRAIN, PRIOR, HELD, more=("--flip", "both"))
    export(path, "webdataset", sets / "out", tar_bytes=1)
    tars = sorted((sets / "out").glob("*.tar"))
    samples = list(Samples(open_manifest(read_manifest(path))))
    assert len(tars) == len(samples) == 8
    kinds = set()
    for file, sample in zip(tars, samples, strict=True):
        with tarfile.open(file) as tar:
            found = {member.name.partition(".")[2]: tar.extractfile(member).read() for member in tar}
        kinds.add(tuple(found))
        facts = json.loads(found["json"])
        assert len(facts["views"]) == len(sample.views) and facts["captions"] == sample.captions
        mask = np.load(io.BytesIO(found["view0.mask.npy"]))
        assert mask.shape[1:] == np.load(io.BytesIO(found["view0.latent.npy"])).shape[1:]
        assert (mask.min() == 255) == (sample.name != "a.png" or sample.role != "train")
        if sample.role == "validation":
            assert found["view1.latent.npy"] == found["view0.latent.npy"]
    assert len(kinds) == 1 and {"view1.mask.npy", "text1.hidden.npy"} <= set(next(iter(kinds)))
