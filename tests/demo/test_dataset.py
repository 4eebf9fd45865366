"""The demo's dataset is what its recipe and its README claim, and its broken files are broken."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, UnidentifiedImageError

from prep.demo import write_demo
from prep.demo.dataset import photos, write_dataset
from prep.demo.vocabulary import COLORS, GROUNDS, LEFT_OUT, SHAPES
from prep.errors import PathError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    write_dataset(root)
    return root


def pictures(root: Path) -> list[Path]:
    found = (path for path in (root / "photos").rglob("*") if path.suffix in (".png", ".jpg", ".webp"))
    return sorted(path for path in found if path.parent.name != "broken" and "masklabel" not in path.name)


def words(picture: Path) -> str:
    sidecars = (picture.with_suffix(suffix) for suffix in (".txt", ".caption"))
    return next(path for path in sidecars if path.exists()).read_text()


def test_same_seed_same_bytes(root, tmp_path):
    write_dataset(tmp_path)
    names = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert all((root / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_another_seed_draws_others(tmp_path):
    write_dataset(tmp_path / "a", count=4, seed=1)
    write_dataset(tmp_path / "b", count=4, seed=2)
    a, b = ({path.read_bytes() for path in pictures(tmp_path / name)} for name in "ab")
    assert len(a) == len(b) == 4
    assert not a & b


def test_captions_name_shape_color_and_ground(root):
    found = pictures(root)
    assert len(found) == 48
    for path in found:
        spoken = words(path).split()
        assert [len(set(spoken) & set(kind)) for kind in (COLORS, SHAPES, GROUNDS)] == [1, 1, 1]
    assert {path.suffix for path in found} == {".png", ".jpg", ".webp"}
    assert {len(path.relative_to(root).parts) for path in found} == {3, 4}


def test_half_show_what_the_model_never_saw(root):
    color, shape = LEFT_OUT
    assert sum(f"{color} {shape}" in words(path) for path in pictures(root)) == 24
    assert sum(shape in words(path) for path in pictures(root)) == 24, "no heart of another color"


def test_masks_have_their_pictures_sizes(root):
    masks = [path for path in (root / "photos").rglob("*-masklabel.png") if path.parent.name != "broken"]
    assert len(masks) == 32
    for path in masks:
        stem = path.name.removesuffix("-masklabel.png")
        picture = next(each for each in pictures(root) if each.stem == stem)
        with Image.open(path) as mask, Image.open(picture) as shown:
            assert mask.mode == "L"
            assert mask.size == shown.size
            assert mask.getextrema() == (0, 255)


def test_good_pictures_decode(root):
    for path in pictures(root):
        with Image.open(path) as picture:
            picture.load()
            assert min(picture.size) >= 64


def test_sizes_are_spread_over_both_halves():
    drawn = list(photos(48, 0))
    new = {photo.size for photo in drawn if photo.shape == LEFT_OUT[1]}
    assert new == {photo.size for photo in drawn if photo.shape != LEFT_OUT[1]}
    assert len(new) == 8


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("truncated.jpg", OSError),
        ("not-a-picture.png", UnidentifiedImageError),
        ("zero-bytes.png", UnidentifiedImageError),
    ],
)
def test_broken_pictures_are_broken(root, name, error):
    with pytest.raises(error), Image.open(root / "photos" / "broken" / name) as picture:
        picture.load()


def test_broken_captions_and_mask(root):
    broken = root / "photos" / "broken"
    assert not (broken / "empty-caption.txt").read_text().strip()
    assert not (broken / "no-caption.txt").exists()
    with Image.open(broken / "other-mask.png") as picture, Image.open(broken / "other-mask-masklabel.png") as mask:
        assert picture.size != mask.size


def test_a_directory_with_files_is_refused(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(PathError, match="is not empty, expected a new or empty directory") as caught:
        write_demo(tmp_path)
    assert caught.value.exit_code == 5
    assert caught.value.hint.startswith("prep demo ")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_the_demo_is_written_without_torch(tmp_path):
    code = "import sys, pathlib, prep.demo; assert 'PIL' not in sys.modules; "
    code += "prep.demo.write_demo(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "demo")], check=True)
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "dataset.toml", "model", "photos", "prompts.txt", "train.toml", "vision",
    }  # fmt: skip


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PathError, match="is a file, expected a new or empty directory"):
        write_demo(tmp_path / "file")
