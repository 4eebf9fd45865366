"""The gallery: cards as data for the script, pictures that fit, and decoded latents with PSNR, the lowest first."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import synthetic
from PIL import Image
from report_pages import Outline, jpeg

from prep.cli.inspect_manifest import DECODED
from prep.demo.tiny_model import build_random
from prep.errors import ModelError
from prep.findings import finding
from prep.images.thumbnail import SHADE, SHADED, encode_webp, small_shade
from prep.manifest.describe import describe
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.manifest.statistics import Outlier, latent_statistics
from prep.models.vae import VaeDecoder
from prep.pages.finder import CardOrder, FoundCard, cards_json
from prep.pages.originals import Originals
from prep.pages.overlay import Overlay, Shot
from prep.pages.parts import Caption, Card
from prep.pages.snapshot import EmbeddedPictures
from prep.report.snapshots import gallery as module
from prep.report.snapshots import latents
from prep.report.snapshots.gallery import About, Decoded, gallery, spread
from prep.report.snapshots.latents import decode_samples, psnr, to_decode
from prep.report.snapshots.manifest import CaptionTokens, Measurements, page

MADE = date(2024, 2, 29)


def found(name, **changes):
    card = Card(shot=Shot(name=name, address="data:image/webp;base64,AA==", size=(20, 10), overlays=(
        Overlay(left=1, top=2.00004, width=30, height=40, outlined=True, flip=True),)), facts=("train",), part=0.25,
        captions=(Caption(text="</script><b>&\u2028", letters=40),), more_captions=2,
        findings=(finding(name, "truncated", "ends \x1b[31m early"),))
    return FoundCard(card=replace(card, **changes), groups=("train", "64x64"), values=(None, 1 / 3, None))


def test_data_has_all_of_a_card_and_no_sign_of_html():
    orders = [CardOrder(title="name", descending=False, by_name=True), CardOrder(title="x", descending=True),
              CardOrder(title="y", descending=False)]
    text = cards_json([found("a"), found("b", beside=Shot(name="b2", address="", instead="none"))], orders, fixed=1)
    assert not set("<>&\u2028") & set(text)
    data = json.loads(text)
    assert data["groups"] == [["train"], ["64x64"]] and data["orders"] == [[True, False], [False, True], [False, False]]
    first, second = data["cards"]
    common = {"c": [["</script><b>&\\u2028", 40]], "e": [["error", "truncated", "ends \\x1b[31m early"]], "g": [0, 0],
              "v": [None, 0.33333, None]}
    assert first == {"n": "a", **common}
    assert second == {"n": "b", **common, "m": 2, "x": ["train"], "p": 0.25, "a": "webp,AA==", "z": [20, 10],
                      "b": [[1, 2, 30, 40, "outlined alone flip"]],
                      "d": {"n": "b2", "a": "", "i": "none", "z": None, "b": []}}


def test_samples_are_spread():
    assert spread(5, 10) == [0, 1, 2, 3, 4] and spread(10, 3) == [0, 3, 6] and spread(0, 3) == []


def test_the_side_of_pictures_falls_with_their_number():
    sides = [module._side(count, 10 << 20) for count in (1, 120, 121, 1000, 3000, 10_000, 100_000)]
    assert sides[:3] == [320, 320, 256] and sides == sorted(sides, reverse=True) and sides[-1] == 48
    for side, size in module.SIDES:
        assert module._side(1000, 1000 * (size + module.SHADE_BYTES + 1) * 4 // 3) == side


def test_small_pictures_are_webp():
    pixels = np.full((10, 20, 3), (200, 30, 30), np.uint8)
    with Image.open(io.BytesIO(encode_webp(pixels))) as picture:
        assert picture.format == "WEBP" and picture.size == (20, 10)
    assert EmbeddedPictures().add(encode_webp(pixels)).startswith("data:image/webp;base64,")
    mask = np.zeros((48, 96), np.uint8)
    mask[:, 48:] = 255
    with Image.open(io.BytesIO(small_shade(mask, 24))) as shade:
        levels = np.asarray(shade.convert("RGBA"))
    assert levels.shape == (12, 24, 4) and (levels[..., :3] == SHADE).all()
    assert set(levels[:, :12, 3].flat) == {round(255 * SHADED)} and set(levels[:, 12:, 3].flat) == {0}


def test_pictures_have_a_limit():
    room = EmbeddedPictures(20)
    assert room.add(b"\xff\xd8\xff" + bytes(9)) and not room.add(b"\xff\xd8\xff" + bytes(9))
    assert (room.refused, room.room) == (1, 4)


def test_many_samples_have_small_pictures_and_one_view(make, monkeypatch):
    monkeypatch.setattr(module, "FEW", 3)
    audit = open_manifest(read_manifest(make(views=2).path))
    asked = []
    monkeypatch.setattr(module, "source_thumbnails", lambda _audit, side: asked.append(side) or (lambda _: jpeg(1)))
    ticks = []
    made = gallery(audit, range(len(audit.samples)), About(), thumbnail=None, tick=ticks.append)
    assert asked == [256] and sum(ticks) == len(made.entries) == len(audit.samples) and len(made.cards) == 3
    assert all(len(one.card.shot.overlays) == 1 for one in made.entries)
    cards = json.loads(made.data)["cards"]
    assert ["x" in card for card in cards] == [False] * 3 + [True] * (len(cards) - 3)
    text = page(audit, MADE, cards=100, thumbnail=lambda _: jpeg(1))
    assert text.split("</template>")[1].count('<li class="card') == 3
    assert "Without scripts, 3 of them are shown." in Outline(text).words


def test_decoded_samples_come_first_the_lowest_psnr_before_all(small):
    about = About(decoded={1: Decoded(picture=jpeg(1), psnr=30.25), 2: Decoded(picture=jpeg(1), psnr=20.5)},
                  scores={0: 4.5}, findings={"a.png": [finding("a.png", "blank", "one color")]})
    made = gallery(small, range(3), about, thumbnail=lambda _: None)
    names = [small.samples.name(number) for number in (2, 1, 0)]
    assert [one.card.shot.name for one in made.entries] == names
    assert "PSNR 20.5 dB" in made.entries[0].card.facts and made.entries[0].card.beside is not None
    assert made.entries[2].card.beside is None and made.entries[2].values[4:] == (4.5, None)
    toned = {one.card.shot.name: (one.card.tone, one.groups[3]) for one in made.entries}
    assert toned["a.png"] == ("warning", "blank") and toned["c.png"] == ("", "none")


def test_latents_and_lengths_are_on_the_page(small):
    measured = Measurements(latents=latent_statistics(small, lambda _: None), tokens=CaptionTokens(
        encoder="CLIP", limit=75, counts=(0, 15, 16, 75, 76, 500), samples=2), outliers=[Outlier(
            sample=0, channel=2, what="mean", value=1.0, usual=0.5, score=-7.0)])
    text = page(small, MADE, cards=3, thumbnail=lambda _: None, measured=measured)
    words = " ".join(Outline(text).words.split())
    assert "CLIP reads 75 tokens of a caption; 2 captions are longer. Shortest 0, median" in words
    bars = text.split("length in tokens of CLIP")[1].split("</table>")[0]
    assert bars.count('<tr class="over">') == 1 and "more<span" in bars
    assert [int(one.split("</span>")[0]) for one in bars.split('<span class="number">')[1:]] == [2, 1, 0, 0, 1, 2]
    assert "Of 2 of 3 samples, evenly spread." in words
    assert "Latents by channel" in words and "Samples that differ from most" in words and "-7.0" in words
    assert "None is told from the others: there are fewer than 12." in words
    empty = page(small, MADE, cards=3, thumbnail=lambda _: None, measured=Measurements())
    assert "No latent was read: none is finite, or the shards are in a store (prep pull fetches them)." in Outline(
        empty).words


def test_psnr_by_hand():
    one, other = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3), np.uint8)
    assert psnr(one, other) == math.inf
    other[0, 0, 0] = 48  # MSE 48² / 48 = 48
    assert psnr(one, other) == pytest.approx(10 * math.log10(255**2 / 48))
    assert psnr(one, np.full((4, 4, 3), 255, np.uint8)) == 0


def test_unusual_samples_are_decoded_and_others_evenly_spread():
    chosen = to_decode(100, 10, [91, 92, 93, 94, 95, 96])
    assert len(chosen) == 10 and {91, 92, 93, 94, 95} <= set(chosen) and 96 not in chosen
    assert to_decode(4, 10, []) == [0, 1, 2, 3] and to_decode(0, 10, []) == []


def test_a_decoded_latent_is_compared_with_the_crop_that_was_encoded(prep, photos, tiny_model, tmp_path):
    """With a decoder that knows the crop: PSNR is infinite for the right one, and finite for a mirrored one."""
    encoded(prep, photos, tiny_model, tmp_path)
    audit = open_manifest(read_manifest(tmp_path / "m.json"))
    number = next(number for number in range(8) if audit.samples.name(number) == "3.png")
    sample = describe(audit, number)
    crop = latents._crop(audit, Originals(audit).picture(sample), number, tuple(sample["bucket"]))
    right = decode_samples(audit, [number], lambda _: crop, lambda _: None)
    wrong = decode_samples(audit, [number], lambda _: crop[:, ::-1].copy(), lambda _: None)
    assert right[number].psnr == math.inf and 0 < wrong[number].psnr < 60
    (photos / "3.png").unlink()
    assert decode_samples(audit, [number], lambda _: crop, lambda _: None)[number].psnr is None


def encoded(prep, photos, model, root):
    done = prep("encode", photos, "--model", model, "--cache", root / "cache", "-o", root / "m.json", "--resolution",
                96, "--step", 16, "--device", "cpu")
    assert done.code == 0, done.err


def test_the_command_decodes_counts_tokens_and_warns_of_another_vae(prep, photos, tiny_model, tmp_path):
    encoded(prep, photos, tiny_model, tmp_path)
    result = prep("inspect", tmp_path / "m.json", "--html", tmp_path / "page.html", "--decode", 3, "--cards", 2)
    assert result.code == 0 and result.err == f"wrote {tmp_path / 'page.html'}\n", result.err
    text = (tmp_path / "page.html").read_text()
    words = Outline(text).words
    assert text.split("</template>")[1].count('class="both"') == 3 and words.count(" dB") == 3
    assert "Latents of 3 samples are decoded beside their pictures" in words and "tokens of a caption" in words
    document = json.loads((tmp_path / "m.json").read_text())
    assert document["models"]["vae"] not in result.err
    build_random(tmp_path / "other", seed=5)
    result = prep("inspect", tmp_path / "m.json", "--html", tmp_path / "page.html", "--model", tmp_path / "other")
    assert result.code == 0 and f"warning: the VAE of {tmp_path / 'other'} is not the one that made" in result.err
    text = (tmp_path / "page.html").read_text()
    assert text.split("</template>")[1].count('class="both"') == min(DECODED, 8)
    assert "is not the one that made them." in Outline(text).words
    assert prep("inspect", tmp_path / "m.json", "--html", tmp_path / "page.html", "--model", tmp_path).code == 6


def test_the_decoder_of_another_kind_of_latent_says_so(tiny_model):
    vae = VaeDecoder(tiny_model, device="cpu")
    made = vae.decode(np.zeros((4, 6, 8), np.float32))
    assert made.dtype == np.uint8 and made.shape == (48, 64, 3)
    with pytest.raises(ModelError, match="cannot decode a latent of this cache") as caught:
        vae.decode(np.zeros((7, 6, 8), np.float32))
    assert caught.value.hint == "name the model that made the cache: --model"


def test_texts_that_do_not_fit_leave_fewer_cards(make, monkeypatch):
    monkeypatch.setattr(module, "FEW", 2)
    monkeypatch.setattr(module, "MOST_TEXT", module.OTHER_TEXT + 900)
    audit = open_manifest(read_manifest(make(counts=(8, 8)).path))
    about = About(decoded={7: Decoded(picture=jpeg(1), psnr=None)})
    made = gallery(audit, range(len(audit.samples)), about, thumbnail=lambda _: None)
    assert 2 <= len(made.entries) < len(audit.samples) and len(made.data.encode()) <= 900
    assert made.entries[0].card.shot.name == audit.samples.name(7)


@pytest.mark.slow
def test_a_page_of_10000_samples_stays_below_15_mb(tmp_path, monkeypatch):
    """Also with pictures of noise, which no photo is as large as, and with names and captions of wide letters."""
    monkeypatch.setattr(synthetic, "caption", lambda number: f"{number} " + "\u6d77\u8fb9\u7684\u7167\u7247" * 60)
    monkeypatch.setattr(synthetic, "WITH_MASK", 1)
    audit = open_manifest(synthetic.build(tmp_path, synthetic.Scale(samples=10_000)))
    noise = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    monkeypatch.setattr(module, "source_thumbnails", lambda _audit, side: lambda _: encode_webp(noise[:side, :side]))
    text = page(audit, MADE, cards=10_000, thumbnail=None)
    assert len(text.encode()) < 15_000_000
    cards = json.loads(text.split('id="cards-data">')[1].split("</script>")[0])["cards"]
    assert len(cards) == 10_000 and "The page has no room for" in text
