"""Tags as captions, and in the prompts and templates of another model: what is chosen, and what is asked again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import taggers
from chat_server import ChatServer
from crashes import state
from PIL import Image

from prep.captioning import tags
from prep.captioning.tags import Tagging, plain, spell_scores

SCORES = spell_scores([(9, "general", 0.2), (9, "explicit", 0.01), (0, "1girl", 0.99), (0, "long_hair", 0.5),
                       (0, "^_^", 0.36), (0, "simple_background", 0.35), (0, "hat", 0.34), (0, "rare", 0.01),
                       (4, "rin_(some_series)", 0.9), (4, "len", 0.8)])


def chosen(**differs):
    return Tagging(tagger="", **differs).chosen(SCORES)


def test_thresholds_and_the_order():
    """Characters first, then from the highest score down."""
    assert chosen() == "rin (some series), 1girl, long hair, ^_^, simple background"
    assert chosen(threshold=0.34, character_threshold=0.8) == (
        "rin (some series), len, 1girl, long hair, ^_^, simple background, hat")
    assert chosen(threshold=1.0, character_threshold=1.0) == ""


def test_ratings_are_remembered_whatever_their_score():
    assert chosen(rating=True, threshold=0.9) == "rin (some series), 1girl, general"
    assert "explicit" in SCORES and "rare" not in SCORES


def test_other_words_and_tags_left_out():
    options = {"without": ["long_hair, 1girl", "^_^"], "words": ["simple_background=plain", "rin (some series)=RIN"]}
    assert tags.tagging_of({"threshold": None, **options}).chosen(SCORES) == "RIN, plain"
    same = tags.tagging_of({"words": ["1girl=girl", "long_hair=girl", "^_^=a_b"], "underscores": True})
    assert same.chosen(SCORES) == "rin_(some_series), girl, a_b, simple_background"
    assert tags.tagging_of({"words": ["=_==closed  eyes"]}).words == (("=_=", "closed eyes"),)


# The list of https://huggingface.co/spaces/SmilingWolf/wd-tagger, app.py.
FACES = ("0_0", "(o)_(o)", "+_+", "+_-", "._.", "<o>_<o>", "<|>_<|>", "=_=", ">_<", "3_3", "6_9", ">_o", "@_@", "^_^",
         "o_o", "u_u", "x_x", "|_|", "||_||")


def test_faces_keep_their_underscores():
    assert [plain(face) for face in FACES] == list(FACES)
    assert [plain(tag) for tag in ("long_hair", "d.va_(overwatch)", "k/da_(league_of_legends)", "tsu_(tsu402)", "v")
            ] == ["long hair", "d.va (overwatch)", "k/da (league of legends)", "tsu (tsu402)", "v"]


def test_all_that_chooses_is_in_the_digest():
    differing = [{}, {"threshold": 0.4}, {"character_threshold": 0.9}, {"without": frozenset({"a"})},
                 {"words": (("a", "b"),)}, {"underscores": True}, {"rating": True}]
    digests = {Tagging(tagger="", **differs).digest for differs in differing} | {Tagging(tagger="x").digest}
    assert len(digests) == len(differing) + 1


@pytest.mark.parametrize("text", ["", "{}", "[[0]]", '[["0", "a", 1]]', "[" * 100_000, "[[0, 1, 2]]"])
def test_scores_that_another_program_wrote(text):
    assert Tagging(tagger="").chosen(text) == ""


# ---- from the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def tagger(tmp_path):
    return taggers.build(tmp_path / "tagger")


@pytest.fixture
def edits(bare):
    return bare.with_name("photos-edits")


def call(source, tagger, *options):
    return ("caption", source, "--tagger", tagger, "--jobs", 1, *options)


def texts(folder: Path):
    return {path.relative_to(folder).as_posix(): path.read_text().strip() for path in sorted(folder.rglob("*.txt"))}


def wanted(picture: Path, threshold=0.35, character=0.85):
    """The caption of a picture, by hand."""
    scores = taggers.scores_of(np.asarray(Image.open(picture).convert("RGB")))
    kinds = {name: category for name, category, *_ in taggers.TAGS}
    names = [name for kind, least in ((4, character), (0, threshold)) for name, score in
             sorted(scores.items(), key=lambda one: -one[1]) if kinds[name] == kind and score >= least]
    return ", ".join(name if name == "^_^" else name.replace("_", " ") for name in names)


def test_captions_are_tags(prep, bare, edits, tagger):
    before = state(bare)
    result = prep(*call(bare, tagger))
    assert result.code == 0 and state(bare) == before
    for name in ("0", "4", "10_grey_cats/2", "10_grey_cats/3"):
        assert texts(edits)[f"{name}.txt"] == wanted(bare / f"{name}.png") != ""
    assert f"note: {tagger} tags 3 pictures on this computer (cpu)" in result.err
    assert "4 captions written, 3 answers asked for, 1 existing kept" in result.out
    again = prep(*call(bare, tagger))
    assert "0 captions written, 0 answers asked for" in again.out and "4 made before" in again.out


def test_choices_run_no_model(prep, bare, edits, tagger, monkeypatch):
    prep(*call(bare, tagger))
    first = texts(edits)

    def asked(*_):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("prep.captioning.tagger.Tagger._load", asked)
    for options in (("--tag-threshold", 0.75), ("--character-threshold", 0.99), ("--tags-without", "1girl"),
                    ("--tags-replace", "grey background=gray"), ("--tags-underscores",), ("--tags-rating",),
                    ("--template", "{folder}, {tags}"), ("--trigger", "sks")):
        result = prep(*call(bare, tagger, *options))
        assert result.code == 0, result.err
        assert "4 captions written, 0 answers asked for" in result.out and result.err == "", options
        assert texts(edits) != first, options
    assert texts(edits)["0.txt"] == f"sks, {wanted(bare / '0.png')}"
    prep(*call(bare, tagger, "--tag-threshold", 0.7))
    assert texts(edits)["4.txt"] == wanted(bare / "4.png", threshold=0.7)
    shutil.rmtree(edits)
    assert "4 captions written, 0 answers asked for" in prep(*call(bare, tagger)).out and texts(edits) == first


def test_the_size_and_the_alpha_of_what_a_tagger_sees(prep, tmp_path, tagger):
    """Transparency becomes white, as everywhere."""
    folder = tmp_path / "clear"
    folder.mkdir()
    Image.new("RGBA", (40, 20), (0, 0, 0, 0)).save(folder / "a.png")
    result = prep(*call(folder, tagger, "--json"))
    assert result.json["captions"] == [{"path": "a.png", "captions": [
        "rin (some series), 1girl, long hair, grey background, ^_^"]}]


def test_no_tag_that_is_sure_enough(prep, bare, edits, tagger):
    result = prep(*call(bare, tagger, "--tag-threshold", 1, "--character-threshold", 1))
    assert "empty-caption" in result.out and "no tag has a score that is high enough" in result.out
    assert not edits.exists()


def test_tags_in_prompts_and_templates(prep, bare, edits, tagger):
    with ChatServer(lambda request, before: f"said {len(request.prompt)}") as server:
        words = ("--endpoint", server.url, "--model", "tiny", "--prompt", "Tags: {tags}!", "--template",
                 "{caption} ({tags})")
        first = prep(*call(bare, tagger, *words))
        assert first.code == 0, first.err
        assert [line for line in first.err.splitlines() if line.startswith("note: 3 pictures will be sent")]
        assert f"note: {tagger} tags 3 pictures on this computer (cpu)" in first.err
        assert {request.prompt for request in server.asked} == {
            f"Tags: {wanted(bare / name)}!" for name in ("0.png", "10_grey_cats/2.png", "10_grey_cats/3.png")}
        tagged = wanted(bare / "0.png")
        assert texts(edits)["0.txt"] == f"said {len(tagged) + 7} ({tagged})"
        again = prep(*call(bare, tagger, *words))
        assert "0 captions written, 0 answers asked for" in again.out and "4 made before" in again.out
        assert len(server.asked) == 3
        same = prep(*call(bare, tagger, *words, "--tag-threshold", 0.34999))  # the same tags: only written again
        assert "4 captions written, 0 answers asked for" in same.out and len(server.asked) == 3
        other = prep(*call(bare, tagger, *words, "--tags-without", "1girl"))
        assert "4 captions written, 3 answers asked for" in other.out and "tags 3 pictures" not in other.err
        assert "1girl" not in texts(edits)["0.txt"] and len(server.asked) == 6


def test_tags_of_names_are_no_fields(prep, bare, edits, tagger):
    """A directory called {tags} is a name, not a field."""
    (bare / "10_grey_cats").rename(bare / "{tags}")
    with ChatServer(lambda request, before: request.prompt) as server:
        prep(*call(bare, tagger, "--endpoint", server.url, "--model", "m", "--prompt", "{folder}: {tags}"))
    assert texts(edits)["{tags}/2.txt"] == f"{{tags}}: {wanted(bare / '{tags}' / '2.png')}"


def test_a_dry_run_tags_nothing(prep, bare, edits, tagger, tmp_path, monkeypatch):
    with ChatServer() as server:
        words = ("--endpoint", server.url, "--model", "m", "--template", "{caption}, {tags}")
        result = prep(*call(bare, tagger, *words, "--dry-run"))
        assert "4 pictures would get a caption, 3 answers would be asked for" in result.out
        assert "tags 3 pictures" in result.err and not (tmp_path / "remembered" / "captions").exists()
        assert not server.asked and not edits.exists()
        prep(*call(bare, tagger))
        shutil.rmtree(edits)
        assert "tags 3 pictures" not in prep(*call(bare, tagger, *words, "--dry-run")).err


def test_a_picture_that_cannot_be_tagged_is_not_asked_about(prep, bare, edits, tagger):
    data = bytearray((bare / "0.png").read_bytes())
    data[len(data) // 2] ^= 255
    (bare / "6.png").write_bytes(data)
    with ChatServer() as server:
        result = prep(*call(bare, tagger, "--endpoint", server.url, "--model", "m", "--prompt", "{tags}", "--json"))
        assert [one["path"] for one in result.json["findings"] if one["severity"] == "error"] == ["6.png"]
        assert len(server.asked) == 3 and result.json["todo"] == 5 and result.json["written"] == 4


@pytest.mark.parametrize(("words", "message", "hint"), [
    (("--prompt", "what?"), "--prompt is for a model that describes pictures, but --model is not given", ""),
    (("--side", 64), "--side is for a model that describes pictures, but --model is not given", ""),
    (("--timeout", 5), "--timeout is for a model of a server, but --endpoint is not given", ""),
    (("--endpoint", "http://localhost:1"), "--model is missing", "--tagger SmilingWolf/wd-vit-tagger-v3 --download"),
    (("--tags-replace", "a"), "--tags-replace is 'a', expected OLD=NEW", "--tags-without leaves a tag out"),
    (("--tags-replace", "a= "), "--tags-replace is 'a= ', expected OLD=NEW", ""),
    (("--template", "a"), "--template is 'a', expected one with {caption}", ""),
    (("--model", "m", "--endpoint", "http://localhost:1"),
     "--tagger is given, but neither --prompt nor --template has {tags}", "Describe this image. Its tags: {tags}"),
    (("--tag-threshold", 0.01), "Input should be greater than or equal to 0.05", "")])
def test_words_that_are_refused(prep, bare, tagger, words, message, hint):
    result = prep(*call(bare, tagger, *words))
    assert result.code == 2 and message in result.err and hint in result.err


@pytest.mark.parametrize(("words", "message"), [
    (("--prompt", "of {tags}"), "--prompt has '{tags}', but there is no tagger"),
    (("--template", "{caption}, {tags}"), "--template has '{tags}', but there is no tagger"),
    (("--tag-threshold", 0.4), "--tag-threshold is for a tagger, but --tagger is not given"),
    (("--tags-without", "a"), "--tags-without is for a tagger, but --tagger is not given"),
    (("--character-threshold", 0.4), "--character-threshold is for a tagger, but --tagger is not given")])
def test_tags_without_a_tagger(prep, bare, words, message):
    result = prep("caption", bare, "--endpoint", "http://localhost:1", "--model", "m", *words)
    assert result.code == 2 and message in result.err


def test_a_tagger_that_is_not_here(prep, bare, tagger):
    result = prep(*call(bare, "org/elsewhere"))
    assert result.code == 6 and "add --download" in result.err
    result = prep(*call(bare, tagger / "model.onnx"))
    assert result.code == 6 and "expected a directory with model.onnx and selected_tags.csv" in result.err
    assert "name a directory with model.onnx and selected_tags.csv, or a Hub id" in prep(*call(bare, "a b")).err
