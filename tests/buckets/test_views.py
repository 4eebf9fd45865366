"""Views: every cut lies in its picture, chance is keyed by the picture, the focus is the mask's, train draws all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from row_values import read_row

from prep.batching.plan import step_plan
from prep.buckets.views import CROPS, FLIPS, Framing, focus_crop, random_crops, views_of
from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.errors import ConfigError
from prep.geometry import ONE, cover
from prep.images.mask import focus_in, focus_of
from prep.loader import draws
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.manifest.tables import SAMPLES, SHARDS, read_table
from prep.recipe.load import load_recipe
from prep.recipe.write import render_recipe

SIDE = st.integers(1, 3000)
BUCKET = st.tuples(st.integers(1, 32), st.integers(1, 32)).map(lambda one: (one[0] * 64, one[1] * 64))
DIGEST = st.integers(0, 1 << 20).map(lambda number: f"{number:064x}")
SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu")


@given(st.tuples(SIDE, SIDE), BUCKET, DIGEST, st.sampled_from(CROPS), st.sampled_from(FLIPS), st.integers(1, 12),
       st.none() | st.tuples(st.integers(0, ONE), st.integers(0, ONE)))  # fmt: skip
@settings(max_examples=300)
def test_every_view_lies_in_its_picture_and_no_two_are_the_same(size, bucket, picture, crop, flip, count, focus):
    placement = cover(size, bucket)
    views = views_of(placement, picture, Framing(crop=crop, views=count, flip=flip), focus)
    slack = [whole - cut for whole, cut in zip(placement.scaled, bucket, strict=True)]
    for view in views:
        assert view.bucket == bucket and view.scaled == placement.scaled
        assert all(0 <= at <= most for at, most in zip(view.crop, slack, strict=True))
    assert len(set(views)) == len(views)
    cuts = min(count, (slack[0] + 1) * (slack[1] + 1)) if crop == "random" else 1
    assert len(views) == cuts * (2 if flip == "both" else 1)
    assert {view.flip for view in views} == {"none": {False}, "both": {False, True}, "always": {True}}[flip]


def test_more_views_leave_the_first_as_they_are():
    placement = cover((700, 512), (512, 512))
    cuts = random_crops(placement, "a" * 64, 189)
    assert random_crops(placement, "a" * 64, 5) == cuts[:5]
    assert sorted(cuts) == [(left, 0) for left in range(189)], "with as many views as offsets each has its own"


def test_chance_depends_on_the_picture_and_the_bucket():
    wide, wider = cover((700, 512), (512, 512)), cover((700, 512), (448, 448))
    found = [random_crops(one, picture, 4) for one in (wide, wider) for picture in ("a" * 64, "b" * 64)]
    assert len({tuple(one) for one in found}) == 4
    # What is in caches rests on these numbers: whoever changes them raises MEANING.
    assert found[0] == [(48, 0), (19, 0), (145, 0), (20, 0)]


def test_offsets_are_evenly_spread():
    placement = cover((604, 512), (512, 512))
    found = np.array([random_crops(placement, f"{number:064x}", 1)[0][0] for number in range(2000)])
    assert abs(found.mean() - 46) < 2.5 and found.min() == 0 and found.max() == 92


def mask(width: int, height: int, box: tuple[int, int, int, int]) -> np.ndarray:
    found = np.zeros((height, width), np.uint8)
    found[box[1]:box[3], box[0]:box[2]] = 255
    return found


def test_the_focus_is_the_centre_of_mass():
    assert focus_of(mask(100, 50, (0, 0, 100, 50))) == (ONE // 2, ONE // 2)
    assert focus_of(mask(100, 50, (0, 0, 1, 50))) == (round(ONE / 200), ONE // 2)
    assert focus_of(mask(64, 64, (48, 0, 64, 32))) == (ONE * 56 // 64, ONE // 4)
    assert focus_of(mask(64, 64, (0, 0, 0, 0))) is None
    assert focus_in(b"no picture", "mask") is None


@pytest.mark.parametrize(("box", "left"), [((0, 0, 20, 100), 0), ((280, 0, 300, 100), 200), ((140, 0, 160, 100), 100),
                                           ((110, 0, 130, 100), 70)])
def test_the_focus_is_in_the_middle_where_the_picture_allows(box, left):
    placement = cover((300, 100), (100, 100))
    assert focus_crop(placement, focus_of(mask(300, 100, box))) == (left, 0)


@pytest.mark.parametrize(
    ("image", "says"),
    [("crop = 'left'", "image.crop is 'left', expected one of: centre, random, focus"),
     ("flip = 'yes'", "image.flip is 'yes', expected one of: none, both, always"),
     ("crop = 'random'\nviews = 0", "image.views is 0, expected a number from 1 to 64"),
     ("views = 4", "image.views is 4 and image.crop 'centre', which makes one crop"),
     ("crop = 'focus'\n[mask]\nfrom = 'none'", "image.crop is 'focus' and there are no masks, expected masks to")],
)  # fmt: skip
def test_views_that_are_none(tmp_path, image, says):
    (tmp_path / "photos").mkdir()
    recipe = tmp_path / "dataset.toml"
    recipe.write_text(f"[image]\n{image}\n[[source]]\npath = 'photos'")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, choices={})
    assert says in str(caught.value)


def test_a_focus_needs_masks_that_are_there(prep, photos):
    assert prep("bucket", photos, "--crop", "focus").code == 0
    for path in photos.glob("*-masklabel.png"):
        path.unlink()
    result = prep("bucket", photos, "--crop", "focus")
    assert result.code == 3 and "image.crop is 'focus' and there are no masks" in result.err
    assert "--crop centre needs none" in result.err


def test_masks_that_are_not_used_are_a_notice(prep, photos):
    said = "note: 3 masks beside the pictures are not used; --mask sidecar uses them"
    assert said in prep("bucket", photos, "--mask", "none").err
    assert all(said not in prep("bucket", photos, *args).err for args in ((), ("--mask", "none", "--quiet")))


def test_center_is_centre(prep, photos, tmp_path):
    (tmp_path / "r.toml").write_text("[image]\ncrop = 'center'\n[[source]]\npath = 'photos'")
    found = load_recipe(tmp_path / "r.toml", choices={})
    assert found.image.crop == "centre" and "center" not in render_recipe(found, base=tmp_path)
    assert load_recipe(photos, choices={"image.crop": "center"}).options == ()
    american, british = (prep("bucket", photos, "--crop", word, "--json") for word in ("center", "centre"))
    assert american.code == 0 and american.out == british.out


def test_options_are_shown_again(photos):
    recipe = load_recipe(photos, choices={"image.crop": "random", "image.views": 3, "image.flip": "both"})
    assert recipe.options == ("--crop", "random", "--views", "3", "--flip", "both")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*options)` encodes the photos into squares, with masks; the report."""

    def go(*options):
        done = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                    *SMALL, "--json", "--buckets", "single", "--mask", "sidecar", "--upscale", "allow", *options)
        assert done.code == 0, done.err
        return done.json

    return go


def samples_in(manifest: Path):
    """The rows of the table of samples, by name, and what reads the rows of their views."""
    opened = read_manifest(manifest)
    cache = Cache(root=opened.cache_root)
    shards = [digest.hex() for digest in
              read_table(cache, opened.document["tables"]["shards"], SHARDS)["digest"].to_pylist()]
    reader = Reader(cache)
    samples = read_table(cache, opened.document["tables"]["samples"], SAMPLES).to_pylist()
    return ({sample["name"]: sample for sample in samples},
            lambda view, field: read_row(reader, shards[view[f"{field}_shard"]], field, view[f"{field}_row"]))


def test_more_views_of_the_same_pictures_encode_only_what_is_new(encode, tmp_path):
    options = ("--crop", "random", "--flip", "both", "--validation", 0.4)
    first = encode(*options, "--views", 3)
    samples, _ = samples_in(tmp_path / "m.json")
    train = {name: sample["views"] for name, sample in samples.items() if sample["role"] == "train"}
    held = [sample["views"] for sample in samples.values() if sample["role"] == "validation"]
    assert held and all(len(views) == 1 and not views[0]["flip"] for views in held), "nobody looks at others"
    assert {len(views) for views in train.values()} <= {2, 4, 6} and max(map(len, train.values())) == 6
    assert first["encoded"]["latent"] == sum(map(len, [*train.values(), *held]))
    assert encode(*options, "--views", 3)["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert encode(*options, "--views", 1)["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    more = encode(*options, "--views", 5)["encoded"]
    assert 0 < more["latent"] < first["encoded"]["latent"]


def test_each_row_is_what_its_view_says(encode, photos, tiny_model, tmp_path):
    """Latents are the VAE's of the cut by hand, mirrored where the view is; masks are of the same cut."""
    encode("--crop", "random", "--views", 2, "--flip", "both")
    samples, row = samples_in(tmp_path / "m.json")
    vae = AutoencoderKL.from_pretrained(tiny_model / "vae")
    factor = 8
    for name in ("2.png", "3.png"):
        picture, masked = Image.open(photos / name).convert("RGB"), photos / name.replace(".png", "-masklabel.png")
        assert len(samples[name]["views"]) == 4
        for view in samples[name]["views"]:
            whole = (view["scaled_width"], view["scaled_height"])
            box = (view["crop_x"], view["crop_y"], view["crop_x"] + 96, view["crop_y"] + 96)
            turn = slice(None, None, -1 if view["flip"] else 1)
            pixels = np.asarray(picture.resize(whole, Image.Resampling.LANCZOS).crop(box))[:, turn].astype(np.float32)
            with torch.no_grad():
                wanted = vae.encode(torch.from_numpy(pixels.transpose(2, 0, 1)[None] / 127.5 - 1)).latent_dist.mean
            assert np.abs(row(view, "latent") - wanted[0].numpy()).max() < 1e-4
            if masked.exists():
                cells = np.asarray(Image.open(masked).convert("L").resize(whole, Image.Resampling.BILINEAR).crop(box))
                means = cells[:, turn].reshape(96 // factor, factor, 96 // factor, factor).mean(axis=(1, 3))
                assert np.abs(row(view, "mask").reshape(12, 12) - means).max() <= 0.5
            else:
                assert view["mask_shard"] == -1


def test_train_draws_every_view_with_its_own_mask(encode, tmp_path):
    encode("--crop", "random", "--views", 3, "--flip", "both")
    index = open_index(read_manifest(tmp_path / "m.json"))
    rows = Rows(index)
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=4)
    shots = [shot for request in draws.training(index, plan, 0, 60, timesteps=1000)
             for shot in request.draws]
    assert {shot.view for shot in shots} == set(range(int(index.samples.view_offsets[-1])))
    places = rows.places(shots, masked=True)
    masked = {pair for pair in zip(places.latents, places.masks, strict=True) if pair[1] is not None}
    assert len({latent for latent, _ in masked}) == len(masked) == len({mask for _, mask in masked})


def test_the_crop_goes_where_the_mask_is(encode, photos, tmp_path):
    for number, (left, right) in ((2, (0, 20)), (3, (120, 140))):
        with Image.open(photos / f"{number}.png") as picture:
            size = picture.size
        Image.fromarray(mask(*size, (left, 0, right, size[1]))).save(photos / f"{number}-masklabel.png")
    encode("--crop", "focus")
    samples, _ = samples_in(tmp_path / "m.json")
    views = {name: sample["views"][0] for name, sample in samples.items()}
    assert views["2.png"]["crop_x"] == 0
    assert views["3.png"]["crop_x"] == views["3.png"]["scaled_width"] - 96
    assert views["7.png"]["crop_x"] == (views["7.png"]["scaled_width"] - 96) // 2, "it has no mask"
    assert encode("--crop", "focus")["encoded"] == {"latent": 0, "mask": 0, "text": 0}


def test_the_focus_of_transparency(prep, tmp_path):
    (tmp_path / "photos").mkdir()
    picture = np.full((96, 192, 4), 200, np.uint8)
    picture[:, :150, 3] = 0
    Image.fromarray(picture).save(tmp_path / "photos" / "a.png")
    options = ("--resolution", 96, "--step", 16, "--buckets", "single", "--json")
    found = prep("bucket", tmp_path / "photos", *options, "--mask", "alpha", "--crop", "focus").json
    assert found["pictures"][0]["views"] == [{"crop": [96, 0], "flip": False}]
    assert found["buckets"][0]["views"] == 1
    several = prep("bucket", tmp_path / "photos", *options, "--crop", "random", "--views", 4, "--flip", "always").json
    assert [view["flip"] for view in several["pictures"][0]["views"]] == [True] * 4
    assert several["buckets"][0]["views"] == 4
