"""`prep view --edit`: what is saved and where, what is refused, conflicts, undo, kills, and what a re-encode costs."""

from __future__ import annotations

import html
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from threading import Barrier

import numpy as np
import pytest
from crashes import Crashed, Disk
from crashes import state as disk_state
from pictures import draw, draw_mask
from PIL import Image
from viewing import viewing, viewing_source

from prep.cli.view import _recipe, _sources_of
from prep.dataset.edits.log import UndoLog
from prep.dataset.edits.places import EditPlaces, check_editable, check_folder, folder_of
from prep.dataset.edits.record import Recorder
from prep.dataset.edits.refused import Refused
from prep.dataset.ingest import ingest
from prep.digest import canonical, with_checksum
from prep.errors import ConfigError, PathError, UsageError
from prep.fs.below import Below
from prep.fs.blob import Blob
from prep.fs.memo import Memo
from prep.fs.remote.bucket import Bucket
from prep.fs.untrusted import NotRegularFile
from prep.manifest.select import SORTS, Query
from prep.progress import silent
from prep.recipe.load import load_recipe
from prep.recipe.options import given_by, without_caption_stop
from prep.recipe.write import render_recipe
from prep.view.data import Data
from prep.view.edit.cost import cost_of
from prep.view.edit.editor import MOST_TEXT, Editor, Edits, Sent
from prep.view.guard import MOST_SENT
from prep.view.source import state
from prep.view.source.state import SourceSet, state_of
from prep.view.source.survey import survey_source

SMALL = {"image.resolution": 64, "image.step": 16, "image.shortest": 32}


@pytest.fixture
def pictures(tmp_path):
    """a.png with caption and mask, b.png in a directory with two captions, c.png with nothing."""
    root = tmp_path / "pictures"
    draw(root / "a.png", (96, 80), seed=1).with_suffix(".txt").write_text("of a")
    draw_mask(root / "a-masklabel.png", (96, 80))
    draw(root / "sub" / "b.png", (80, 96), seed=2).with_suffix(".txt").write_text("one of b\ntwo of b\n")
    draw(root / "c.png", (96, 96), seed=3)
    return root


@pytest.fixture
def edits(tmp_path):
    return tmp_path / "edits"


@pytest.fixture
def server(pictures, edits):
    with viewing_source(pictures, edits, **SMALL) as running:
        yield running


def number(server, name):
    found = re.findall(r'<p class="name"><a href="[^"]*/sample/(\d+)"><bdi>(.*?)</bdi>', server.get().text)
    return {name.replace("<wbr>", ""): int(at) for at, name in found}[name]


def png(mode="L", size=(96, 80), color=0):
    stream = io.BytesIO()
    Image.new(mode, size, color).save(stream, "PNG")
    return stream.getvalue()


def painted(size=(96, 80)):
    """What the canvas sends: RGBA, its left quarter black."""
    picture = Image.new("RGBA", size, "white")
    picture.paste((0, 0, 0, 255), (0, 0, size[0] // 4, size[1]))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def captions(recipe):
    return {one.item.name: tuple(text for text, _ in one.captions)
            for one in ingest(without_caption_stop(recipe), Memo(None), jobs=1).items}


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_caption_is_written_to_the_edits_and_read_by_encode(server, pictures, edits):
    before, at = disk_state(pictures), number(server, "sub/b.png")
    assert "one of b\ntwo of b\n</textarea>" in server.get(f"/sample/{at}").text
    answer = server.save(at, "caption", "  new  words \r\n\r\nand é <b>\n".encode())
    assert (answer.status, answer.text) == (200, "Saved to sub/b.txt.")
    assert (edits / "sub" / "b.txt").read_text() == "new words\nand é <b>\n" and disk_state(pictures) == before
    text = server.get(f"/sample/{at}").text
    assert "<bdi>new words</bdi>" in text and "and é &lt;b&gt;\n</textarea>" in text
    assert server.get("/?q=new+words").text.count('class="card"') == 1
    assert captions(load_recipe(pictures, choices={"edits": edits})) == {
        "a.png": ("of a",), "c.png": ("",), "sub/b.png": ("new words", "and é <b>")}
    assert captions(load_recipe(pictures, choices={}))["sub/b.png"] == ("one of b", "two of b")


def test_a_mask_is_written_at_the_size_of_its_picture(server, pictures, edits):
    before, at = disk_state(pictures), number(server, "a.png")
    assert server.save(at, "mask", painted((48, 40))).text == "Saved to a-masklabel.png."
    mask = Image.open(edits / "a-masklabel.png")
    assert (mask.format, mask.mode, mask.size) == ("PNG", "L", (96, 80)) and disk_state(pictures) == before
    pixels = np.asarray(mask)
    assert not pixels[:, :22].any() and (pixels[:, 26:] == 255).all()
    assert "75.0% of the picture" in server.get(f"/sample/{at}").text
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(server.get(f"/paint/{at}").body))), pixels)
    found = ingest(without_caption_stop(load_recipe(pictures, choices={"edits": edits})), Memo(None), jobs=1).items
    assert next(one for one in found if one.item.name == "a.png").item.mask.file == str(edits / "a-masklabel.png")


def test_the_first_mask_of_all(pictures, edits):
    (pictures / "a-masklabel.png").unlink()
    with viewing_source(pictures, edits, **SMALL) as server:
        at = number(server, "c.png")
        assert server.get(f"/paint/{at}").headers["content-type"] == "image/svg+xml"
        assert 'data-mask="' not in server.get(f"/sample/{at}").text
        assert server.save(at, "mask", painted((96, 96))).status == 200
        assert "75.0% of the picture" in server.get(f"/sample/{at}").text
        assert server.undo(at, "mask").status == 200 and "everything (no mask)" in server.get(f"/sample/{at}").text


def test_sidecars_when_asked(pictures):
    with viewing_source(pictures, sidecars=True, **SMALL) as server:
        at = number(server, "sub/b.png")
        (pictures / "sub" / "b.txt").chmod(0o640)
        assert server.save(at, "caption", b"beside it").text == "Saved to sub/b.txt."
        assert (pictures / "sub" / "b.txt").read_text() == "beside it\n"
        assert (pictures / "sub" / "b.txt").stat().st_mode & 0o777 == 0o640
        assert server.save(number(server, "c.png"), "mask", painted((96, 96))).status == 200
    assert {"sub/b.txt", "c-masklabel.png"} <= set(disk_state(pictures)) and not (pictures / ".undo").exists()
    with viewing_source(pictures, sidecars=True, **SMALL) as server:  # undo after a restart
        assert server.undo(at, "caption").text == "sub/b.txt is as it was before the last save."
        assert server.undo(number(server, "c.png"), "mask").status == 200
    assert (pictures / "sub" / "b.txt").read_text() == "one of b\ntwo of b\n" and len(disk_state(pictures)) == 6


def test_pictures_that_share_a_caption(pictures, edits):
    draw(pictures / "a.jpg", (90, 90), seed=5)
    with viewing_source(pictures, edits, **SMALL) as server:
        assert server.save(number(server, "a.jpg"), "caption", b"of both").status == 200
        assert server.get("/?q=of+both").text.count('class="card"') == 2


def test_findings_follow_a_caption(server):
    at = number(server, "c.png")
    assert "missing-caption" in server.get("/?finding=missing-caption").text
    assert server.save(at, "caption", b"one line\nanother").status == 200
    text = server.get("/findings").text
    assert "missing-caption" not in text and "caption-multiline" in text


# ---- undo and conflicts ----------------------------------------------------------------------------------------------


def test_each_save_can_be_undone(server, edits):
    at = number(server, "a.png")
    for words in (b"first", b"second", b"first", b"first"):
        assert server.save(at, "caption", words).status == 200
    for left in ("second\n", "first\n"):
        assert server.undo(at, "caption").status == 200 and (edits / "a.txt").read_text() == left
    assert "1 caption and 0 masks changed" in server.get("/edits").text
    assert server.undo(at, "caption").status == 200 and not (edits / "a.txt").exists()
    assert "of a\n</textarea>" in server.get(f"/sample/{at}").text and disk_state(edits) == {}
    answer = server.undo(at, "caption")
    assert answer.status == 409 and "there is no edit of a.txt that can be undone" in answer.text
    assert "0 captions and 0 masks changed" in server.get("/edits").text


def test_undo_after_a_restart(pictures, edits):
    with viewing_source(pictures, edits, **SMALL) as server:
        at = number(server, "a.png")
        assert server.save(at, "caption", b"saved").status == 200 and server.save(at, "mask", painted()).status == 200
    with viewing_source(pictures, edits, **SMALL) as server:
        assert "saved\n</textarea>" in server.get(f"/sample/{at}").text
        assert server.undo(at, "caption").status == 200 and server.undo(at, "mask").status == 200
        assert "of a\n</textarea>" in server.get(f"/sample/{at}").text
        assert "50.0% of the picture" in server.get(f"/sample/{at}").text
    assert disk_state(edits) == {}


@pytest.mark.parametrize("kind", ["caption", "mask"])
def test_two_tabs(server, kind):
    at = number(server, "a.png")
    bodies = {"caption": (b"of one", b"of two"), "mask": (painted(), png())}[kind]
    old = server.form(at, kind)
    assert server.save(at, kind, bodies[0]).status == 200
    answer = server.ask("POST", f"{server.base}/edit/{at}/{kind}", body=bodies[1], **old)
    assert answer.status == 409 and answer.text == (
        f"the {kind} was changed elsewhere since this page was loaded: load it again, and edit what is there now")
    assert server.ask("POST", f"{server.base}/undo/{at}/{kind}", body=b"", **old).status == 409
    assert server.save(at, kind, bodies[1]).status == 200


@pytest.mark.parametrize("sidecars", [False, True])
def test_two_programs_that_save_at_once(pictures, edits, sidecars):
    """One save wins, the other one is refused: none is lost that was answered "Saved"."""
    recipe = without_caption_stop(load_recipe(pictures, choices=SMALL))
    recipe, start = replace(recipe, edits=None if sidecars else edits), Barrier(2)

    def save(editor, word, sent):
        start.wait()
        try:
            editor.save(replace(sent, body=word))
        except Refused as error:
            return error.status
        return 200

    def editor():
        source = SourceSet(survey_source(recipe, jobs=1, scan=False, progress=silent))
        return Editor(source, Edits(places=EditPlaces(recipe=recipe, folder=recipe.edits), command=""), lambda *_: None)

    both = editor(), editor()
    with ThreadPoolExecutor(2) as pool:
        for turn in range(12):
            seat, now = both[0].source.state.seats[turn % 3], both[0].editable(turn % 3, "caption")
            sent = Sent(number=turn % 3, kind="caption", sample=seat.id, version=now.version, media="text/plain",
                        body=b"")
            words = [f"{name} {turn}".encode() for name in ("one", "two")]
            answers = list(pool.map(save, both, words, [sent, sent]))
            assert sorted(answers) == [200, 409]
            path = both[0].places.of(seat.item.item, "caption").path
            assert path.read_bytes() == words[answers.index(200)] + b"\n"


def test_a_save_while_another_program_holds_the_place(server, edits, monkeypatch):
    at = number(server, "a.png")
    assert server.save(at, "caption", b"first").status == 200
    monkeypatch.setattr("prep.view.edit.editor.PATIENCE", 0)
    with Below(edits).opened() as folder, folder.locked(0):
        answer = server.save(at, "caption", b"second")
        assert (answer.status, answer.text) == (409, "a.txt is not saved: another program is saving there; try again")
    assert server.save(at, "caption", b"second").status == 200


def test_an_edit_outside(server, pictures, edits):
    at = number(server, "a.png")
    old = server.form(at, "caption")
    (pictures / "a.txt").write_text("changed by hand")
    assert server.save(at, "caption", b"x", x_latentry_version=old["x_latentry_version"]).status == 409
    assert server.save(at, "caption", b"over it").status == 200
    (edits / "a.txt").write_text("by hand again")
    answer = server.undo(at, "caption")
    assert answer.status == 409 and "or it was changed elsewhere since" in answer.text
    assert (edits / "a.txt").read_text() == "by hand again"


def test_another_sample_than_the_page_showed(server):
    a, c = number(server, "a.png"), number(server, "c.png")
    answer = server.save(c, "caption", b"x", x_latentry_sample=server.form(a, "caption")["x_latentry_sample"])
    assert answer.status == 409 and answer.text == "this page shows another picture by now: load it again"


def test_what_an_edit_replaced_is_checked(server, edits):
    at = number(server, "a.png")
    assert server.save(at, "caption", b"one").status == 200 and server.save(at, "caption", b"two").status == 200
    (edits / ".undo" / "00000002.before").write_bytes(b"other")
    assert "what the edit replaced is damaged, so it cannot be undone" in server.undo(at, "caption").text
    (edits / ".undo" / "00000002.before").unlink()
    assert "what the edit replaced cannot be read: " in server.undo(at, "caption").text
    for damage in (b"", b"[]", b"{", b"\xff", b'{"format": "latentry/edit", "version": 2}', b"[" * 100_000):
        (edits / ".undo" / "00000009.json").write_bytes(damage)
        assert server.get("/edits").status == 200 and server.get(f"/sample/{at}").status == 200
    assert (edits / "a.txt").read_text() == "two\n"


@pytest.mark.parametrize("kind", ["caption", pytest.param("mask", marks=pytest.mark.slow)])
def test_a_kill_at_each_change_of_the_disk(pictures, edits, monkeypatch, kind):
    """What is there is the old or the new, whole; what was saved before can still be undone."""
    recipe = without_caption_stop(load_recipe(pictures, choices={**SMALL}))
    recipe = replace(recipe, edits=edits)
    source = SourceSet(survey_source(recipe, jobs=1, scan=False, progress=silent))
    at = next(at for at, seat in enumerate(source.state.seats) if seat.item.item.name == "a.png")
    whole = {word: png(color=color) for word, color in (("one", 10), ("two", 20), ("three", 30))}
    written = {word: f"{word}\n".encode() if kind == "caption" else data for word, data in whole.items()}
    path = edits / ("a.txt" if kind == "caption" else "a-masklabel.png")

    def editor():
        places = EditPlaces(recipe=recipe, folder=edits)
        return Editor(source, Edits(places=places, command=""), lambda data, _size: data)

    def sent(word):
        seat = source.state.seats[at]
        return Sent(number=at, kind=kind, sample=seat.id, version=editor().editable(at, kind).version,
                    media="text/plain" if kind == "caption" else "image/png",
                    body=word.encode() if kind == "caption" else whole[word])

    editor().save(sent("one"))
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        editor().save(sent("two"))
        editor().undo(sent("two"))
    steps = len(disk.seen)
    assert steps > 10 and path.read_bytes() == written["one"]
    for stop in range(steps):
        with monkeypatch.context() as patched:
            disk = Disk(patched)
            disk.left = stop
            with pytest.raises(Crashed):
                editor().save(sent("two"))
                editor().undo(sent("two"))
        assert path.read_bytes() in (written["one"], written["two"]), stop
        assert editor().editable(at, kind).undo
        while path.read_bytes() != written["one"]:
            editor().undo(sent("two"))
        editor().save(sent("three"))
        editor().undo(sent("three"))
        assert path.read_bytes() == written["one"], stop
    editor().undo(sent("one"))
    assert not path.exists()


# ---- many samples ----------------------------------------------------------------------------------------------------


QUERIES = [Query(), *(Query(text=text) for text in ("one", "of", "\u00e9t\u00e9", "a.png")),
           *(Query(sort=sort, descending=down) for sort in SORTS for down in (False, True)),
           *(Query(masked=masked) for masked in (False, True)), Query(low=0.2, high=0.8),
           *(Query(finding=code) for code in ("missing-caption", "empty-caption", "repeated-caption"))]


def as_rebuilt(shown):
    """Asserts that a state equals one that is made anew of its survey."""
    again = state_of(shown.survey)
    assert shown.seats == again.seats and shown.notices == again.notices and shown.placing == again.placing
    assert shown.tables.samples.table.equals(again.tables.samples.table)
    ours, theirs = shown.data.selector, again.data.selector
    assert ours.findings.to_pylist() == theirs.findings.to_pylist() and ours.codes == theirs.codes
    for query in QUERIES:
        assert ours.select(query).tolist() == theirs.select(query).tolist(), query
    names = [field.name for field in fields(Data) if field.name not in ("selector", "describe")]
    assert all(getattr(shown.data, name) == getattr(again.data, name) for name in names)
    for number in range(len(shown.seats)):
        assert shown.data.describe(number) == again.data.describe(number)
        assert ours.findings_of(number) == theirs.findings_of(number)


@pytest.mark.parametrize("options", [{}, {"image.crop": "focus"}, {"image.flip": "both"}])
def test_after_any_edits_what_is_shown_is_as_if_read_anew(pictures, edits, options):
    """Captions and masks, saved and undone in any order; two samples of each picture, two pictures of one caption."""
    draw(pictures / "a.jpg", (96, 64), seed=4)
    recipe = without_caption_stop(load_recipe(pictures, choices={**SMALL, "image.resolution": (32, 64), **options}))
    recipe, chosen = replace(recipe, edits=edits), Random(5)
    source = SourceSet(survey_source(recipe, jobs=1, scan=False, progress=silent))
    editor = Editor(source, Edits(places=EditPlaces(recipe=recipe, folder=edits), command=""), lambda data, _size: data)
    words = ["one", "", "two\nthree", "of it", "one\none", "\u00c9t\u00e9", "x" * 300]
    for _ in range(24):
        number, kind = chosen.randrange(len(source.state.seats)), chosen.choice(("caption", "mask"))
        seat, now = source.state.seats[number], editor.editable(number, kind)
        color = chosen.randrange(256)
        body = chosen.choice(words).encode() if kind == "caption" else png(size=seat.item.size, color=color)
        sent = Sent(number=number, kind=kind, sample=seat.id, version=now.version, body=body,
                    media="text/plain" if kind == "caption" else "image/png")
        (editor.undo if now.undo and chosen.random() < 0.5 else editor.save)(sent)
        as_rebuilt(source.state)


def test_an_edit_renews_its_own_samples_alone(pictures, edits, monkeypatch):
    """With a hundred thousand pictures, making all samples anew takes seconds."""
    recipe = replace(without_caption_stop(load_recipe(pictures, choices=SMALL)), edits=edits)
    source = SourceSet(survey_source(recipe, jobs=1, scan=False, progress=silent))
    editor = Editor(source, Edits(places=EditPlaces(recipe=recipe, folder=edits), command=""), lambda data, _size: data)
    made = []
    monkeypatch.setattr(state, "state_of", None)
    monkeypatch.setattr(state, "_sample", lambda *given, before=state._sample: made.append(given) or before(*given))
    for kind, body in (("caption", b"new"), ("mask", png(size=(96, 80), color=9))):
        seat = next(seat for seat in source.state.seats if seat.item.item.name == "a.png")
        number = source.state.seats.index(seat)
        sent = Sent(number=number, kind=kind, sample=seat.id, version=editor.editable(number, kind).version, body=body,
                    media="text/plain" if kind == "caption" else "image/png")
        editor.save(sent)
    assert [seat.item.item.name for _, seat in made] == ["a.png", "a.png"]
    assert source.data().selector.select(Query(text="new")).tolist() == [number]


# ---- refusals --------------------------------------------------------------------------------------------------------


NOT_OURS = (
    ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403), ({"sec_fetch_site": "cross-site"}, 403),
    ({"sec_fetch_site": "none"}, 403), ({"x_latentry_edit": "x"}, 403), ({"x_latentry_edit": ""}, 403),
    ({"host": "evil.example"}, 403), ({"content_type": "application/json"}, 415), ({"content_type": ""}, 415),
    ({"content_type": "application/x-www-form-urlencoded"}, 415), ({"content_type": "image/png"}, 415),
    ({"x_latentry_version": "0" * 64}, 409), ({"x_latentry_sample": "0" * 64}, 409),
)


def test_what_is_not_sent_by_our_page(server, edits):
    for headers, status in NOT_OURS:
        assert server.save(number(server, "a.png"), "caption", b"x", **headers).status == status, headers
    assert not edits.exists()


def test_a_post_needs_every_part(server, edits):
    at = number(server, "a.png")
    form = server.form(at, "caption")
    for missing in ("origin", "x_latentry_edit", "x_latentry_sample", "x_latentry_version", "content_type"):
        rest = {name: value for name, value in form.items() if name != missing}
        assert server.ask("POST", f"{server.base}/edit/{at}/caption", body=b"x", **rest).status in (403, 409, 415)
    assert server.ask("POST", f"{server.base}/edit/{at}/caption", **form).status == 411
    assert server.ask("POST", f"{server.base}/edit/{at}/caption", transfer_encoding="chunked", **form).status == 411
    assert server.ask("POST", f"/{'x' * 43}/edit/{at}/caption", body=b"x", **form).status == 404
    for path in ("/", f"/sample/{at}", "/edits", f"/paint/{at}"):
        assert server.ask("POST", server.base + path, body=b"x", **form).status == 405
    for path in ("9", "-1", "0/../1", "%2e%2e", "a.png", "..%2f..%2fetc"):
        assert server.ask("POST", f"{server.base}/edit/{path}/caption", body=b"x", **form).status == 404
    assert server.ask("POST", f"{server.base}/edit/{at}/recipe", body=b"x", **form).status == 404
    assert server.ask("GET", f"{server.base}/edit/{at}/caption").status == 405
    assert not edits.exists()


def test_what_is_too_large(server, edits):
    at = number(server, "a.png")
    assert server.save(at, "caption", b"x" * (MOST_TEXT + 1)).status == 413
    form = {**server.form(at, "mask"), "content_length": str(MOST_SENT + 1)}
    assert server.ask("POST", f"{server.base}/edit/{at}/mask", **form).status == 413
    form["content_length"] = "9" * 30
    assert server.ask("POST", f"{server.base}/edit/{at}/mask", **form).status in (400, 413)
    assert not edits.exists()


NO_CAPTIONS = (
    (b"\xff\xfe", "the captions are not UTF-8"), (b"a\x00b", "caption has 1 control character, expected plain text"),
    (b"\x1b[31m", "caption has 1 control character"),
)
NO_MASKS = (b"", b"GIF89a", png(size=(96, 96)), png(size=(192, 160)), painted()[:200],
            b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\0\0\0\0")


def test_captions_that_are_none(server, edits):
    for body, told in NO_CAPTIONS:
        answer = server.save(number(server, "a.png"), "caption", body)
        assert answer.status == 400 and told in answer.text and not edits.exists()


def test_an_empty_caption_that_would_leave_the_picture_out(pictures, edits):
    with viewing_source(pictures, edits, **SMALL, **{"caption.missing": "reject"}) as server:
        answer = server.save(number(server, "a.png"), "caption", b" \n")
        assert answer.status == 400 and "the picture would be left out (--missing-caption reject)" in answer.text
        assert not edits.exists()


def test_masks_that_are_none(server, edits):
    for body in NO_MASKS:
        answer = server.save(number(server, "a.png"), "mask", body)
        assert answer.status == 400 and answer.text == "the mask is no PNG of the picture's shape"
    assert not edits.exists()


def test_without_edit_nothing_is_posted(pictures):
    with viewing_source(pictures, **SMALL) as server:
        assert server.ask("POST", f"{server.base}/edit/0/caption", body=b"x",
                          origin=f"http://127.0.0.1:{server.port}").status == 405
        assert server.get("/edits").status == server.get("/paint/0").status == 404
        assert "connect-src" not in server.get().headers["content-security-policy"]
        assert 'id="edit"' not in server.get("/sample/0").text


def test_links_do_not_lead_out(pictures, edits, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("untouched")
    edits.mkdir()
    (edits / "sub").symlink_to(outside)
    (edits / "a.txt").symlink_to(outside / "secret.txt")
    (edits / ".undo").symlink_to(outside)
    with viewing_source(pictures, edits, **SMALL) as server:
        for name in ("a.png", "sub/b.png"):
            at = number(server, name)
            text = server.get(f"/sample/{at}").text
            assert "Captions are not edited here: " in text and 'id="edit-caption"' not in text
            form = {**server.form(number(server, "c.png"), "caption"),
                    "x_latentry_sample": re.search(r'data-sample="(\w+)', text)[1]}
            answer = server.ask("POST", f"{server.base}/edit/{at}/caption", body=b"x", **form)
            assert answer.status == 409, name
        assert server.save(number(server, "c.png"), "caption", b"x").status == 409  # what it replaces cannot be kept
    assert [one.name for one in outside.iterdir()] == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == "untouched"


def test_places_outside_are_refused(pictures, edits, tmp_path):
    recipe = load_recipe(pictures, choices={})
    item = ingest(without_caption_stop(recipe), Memo(None), jobs=1).items[0].item
    for name in ("../x.png", ".undo/x.png", ".UNDO/x.png", "/x.png"):
        with pytest.raises(Refused, match=r"would not be below .*: edit it where it is"):
            EditPlaces(recipe=recipe, folder=edits).of(replace(item, name=name), "caption")
    elsewhere = replace(item, picture=Blob(file=str(tmp_path / "x.png")))
    with pytest.raises(Refused, match=r"would not be below .*: edit it where it is"):
        EditPlaces(recipe=recipe, folder=None).of(elsewhere, "mask")


def test_a_disk_that_is_full(server, monkeypatch):
    def full(*_words, **_options):
        raise OSError(28, "No space left on device")

    at = number(server, "a.png")
    monkeypatch.setattr("prep.fs.atomic.write", full)
    answer = server.save(at, "caption", b"x")
    assert (answer.status, answer.text) == (507, "it cannot be saved: No space left on device")
    monkeypatch.undo()
    assert "of a\n</textarea>" in server.get(f"/sample/{at}").text


def test_masks_that_are_not_edited(pictures, edits):
    for mask, told in (("none", "masks are not used (--mask none)"),
                       ("alpha", "masks are the pictures&#39; transparency (--mask alpha), which is not edited here")):
        with viewing_source(pictures, edits, mask=mask, **SMALL) as server:
            text = server.get("/sample/0").text
            assert told in text and 'id="edit-mask"' not in text
            form = {**server.form(0, "caption"), "content_type": "image/png"}
            assert server.ask("POST", f"{server.base}/edit/0/mask", body=painted(), **form).status == 409
    masks = pictures.parent / "masks"
    masks.mkdir()
    (pictures / "a-masklabel.png").rename(masks / "a.png")
    with viewing_source(pictures, sidecars=True, mask=str(masks), **SMALL) as server:
        assert "so one beside the picture would not be read" in server.get("/sample/0").text
    with viewing_source(pictures, edits, mask=str(masks), **SMALL) as server:
        at = number(server, "a.png")
        assert server.save(at, "mask", painted()).status == 200
        assert "75.0% of the picture" in server.get(f"/sample/{at}").text


# ---- the recipe and the command --------------------------------------------------------------------------------------


def test_edits_in_a_recipe(pictures, edits, prep):
    edits.mkdir()
    (edits / "c.txt").write_text("of c")
    (edits / "none.txt").write_text("of nothing")
    (edits / "none-masklabel.png").write_bytes(png())
    recipe = pictures.parent / "dataset.toml"
    recipe.write_text('[edits]\nfrom = "edits"\n[[source]]\npath = "pictures"\n')
    found = ingest(load_recipe(recipe, choices={}), Memo(None), jobs=1)
    assert {one.item.name for one in found.items} == {"a.png", "sub/b.png", "c.png"}
    assert {(one.code, one.path) for one in found.findings} == {
        ("orphan-caption", "edits/none.txt"), ("orphan-mask", "edits/none-masklabel.png")}
    assert "orphan-caption" in prep("scan", recipe, "--quiet").out
    assert "orphan-mask" in prep("scan", pictures, "--edits", edits, "--quiet").out
    text = render_recipe(load_recipe(recipe, choices={}), base=recipe.parent)
    assert "[edits]\n" in text and '\nfrom = "edits"\n' in text
    with pytest.raises(PathError, match=r"edits .* is not a directory"):
        load_recipe(pictures, choices={"edits": pictures.parent / "missing"})


def test_what_was_saved_is_used_by_the_next_command(prep, pictures, tmp_path):
    """Of a directory, and of a recipe with that directory; never in silence, and not if it is not wanted."""
    folder, recipe = tmp_path / "pictures-edits", tmp_path / "dataset.toml"
    recipe.write_text('[[source]]\npath = "pictures"\n')
    (folder / ".undo").mkdir(parents=True)
    assert captions(load_recipe(pictures, choices={}))["a.png"] == ("of a",)  # nothing was saved
    with viewing_source(pictures, folder, **SMALL) as server:
        assert server.save(number(server, "a.png"), "caption", b"edited").text == "Saved to a.txt."
    note = ("note: captions and masks of prep view and prep caption are used, those in "
            f"{folder}; --edits none leaves them out")
    for source in (pictures, recipe):
        found = load_recipe(source, choices={})
        assert captions(found)["a.png"] == ("edited",) and found.notes == (note,)
        unwanted = load_recipe(source, choices={"edits": Path("none")})
        assert captions(unwanted)["a.png"] == ("of a",) and not unwanted.notes and not unwanted.edits
        assert unwanted.options == ("--edits", "none")
        for words in (("scan",), ("bucket", "--resolution", 64, "--step", 16)):
            assert note in prep(words[0], source, *words[1:]).err
            assert note not in prep(words[0], source, *words[1:], "--edits", "none").err
            assert note not in prep(words[0], source, *words[1:], "--quiet").err
    recipe.write_text('[edits]\nfrom = "none"\n[[source]]\npath = "pictures"\n')
    assert captions(load_recipe(recipe, choices={}))["a.png"] == ("of a",)
    draw(tmp_path / "more" / "b.png", (96, 80), seed=7)
    recipe.write_text('[[source]]\npath = "pictures"\n[[source]]\npath = "more"\n')
    found = load_recipe(recipe, choices={})
    assert found.edits is None and found.notes == (
        f"note: edits in {folder} are not used: name it with --edits, or as from in [edits] of a recipe",)


def test_edits_of_a_directory_are_those_of_a_recipe_of_its_subdirectories(tmp_path, prep):
    """As prep init writes it for a layout of kohya's; the subdirectory alone says what it does not use."""
    photos, recipe = tmp_path / "photos", tmp_path / "dataset.toml"
    for name in ("10_cat", "20_dog"):
        draw(photos / name / "0.png", (96, 80), seed=len(name)).with_suffix(".txt").write_text(name)
    with viewing_source(photos, folder := tmp_path / "photos-edits", **SMALL) as server:
        for name in ("10_cat", "20_dog"):
            assert server.save(number(server, f"{name}/0.png"), "caption", f"a {name}".encode()).status == 200
    assert prep("init", photos, "-o", recipe, "--quiet").code == 0
    found = load_recipe(recipe, choices={})
    assert len(found.sources) == 2 and found.edits == folder
    assert {one.captions[0][0] for one in ingest(found, Memo(None), jobs=1).items} == {"a 10_cat", "a 20_dog"}
    assert "edits in" in load_recipe(photos / "10_cat", choices={}).notes[0]


@pytest.mark.parametrize("sidecars", [False, True])
def test_systems_without_descriptors_of_directories(pictures, edits, monkeypatch, sidecars):
    monkeypatch.setattr("prep.fs.below.by_descriptor", lambda: False)
    root = pictures if sidecars else edits
    with viewing_source(pictures, None if sidecars else edits, sidecars=sidecars, **SMALL) as server:
        at = number(server, "sub/b.png")
        for words in (b"first", b"second"):
            assert server.save(at, "caption", words).status == 200
        assert (root / "sub" / "b.txt").read_text() == "second\n"
        assert server.undo(at, "caption").status == server.undo(at, "caption").status == 200
    assert (root / "sub" / "b.txt").exists() == sidecars
    (edits / "sub").mkdir(parents=True, exist_ok=True)
    (edits / "sub" / "c").symlink_to(pictures)
    with pytest.raises(NotRegularFile), Below(edits, ("sub", "c")).opened():
        pass


def test_a_save_writes_edits_into_the_recipe(prep, pictures, tmp_path):
    recipe = tmp_path / "dataset.toml"
    for before in (b'[[source]]\npath = "pictures"', b'# mine\r\n[[source]]\r\npath = "pictures"  # all\r\n',
                   b'\xef\xbb\xbf[[source]]\npath = "pictures"\n[source.caption]\nmissing = "empty"\n'):
        recipe.write_bytes(before)
        record = Recorder(recipe, tmp_path / "pictures-edits")
        assert record() == " dataset.toml now names the edits: [edits]." and record() == ""
        after, end = recipe.read_bytes(), b"\r\n" if b"\r" in before else b"\n"
        assert after.startswith(before) and after.endswith(end.join([b"[edits]", b'from = "pictures-edits"', b""]))
        (tmp_path / "pictures-edits").mkdir(exist_ok=True)
        assert load_recipe(recipe, choices={}).edits == tmp_path / "pictures-edits"
        assert Recorder(recipe, tmp_path / "other")() == "" and recipe.read_bytes() == after
    recipe.write_text("no TOML")
    assert "add --edits " in Recorder(recipe, tmp_path / "edits")() and recipe.read_text() == "no TOML"


def test_the_first_save_of_the_command_writes_into_the_recipe(pictures, tmp_path):
    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[image]\nresolution = 64\nstep = 16\n[[source]]\npath = "pictures"\n')
    with viewing(recipe, "--edit", "--missing-caption", "empty") as running:
        text = recipe.read_text()
        assert running.save(0, "caption", b"first").text.endswith(" dataset.toml now names the edits: [edits].")
        assert recipe.read_text() == text + '\n[edits]\nfrom = "dataset-edits"\n'
        assert running.save(0, "caption", b"second").text.count(".") == 2
        assert running.interrupt()[0] == 0


def test_an_edit_of_one_source_is_none_of_another(pictures, edits, tmp_path):
    draw(tmp_path / "more" / "a.png", (96, 80), seed=7)
    edits.mkdir()
    (edits / "sub").mkdir()
    (edits / "sub" / "b.txt").write_text("of b")
    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[edits]\nfrom = "edits"\n[[source]]\npath = "pictures"\n[[source]]\npath = "more"\n')
    found = ingest(without_caption_stop(load_recipe(recipe, choices={})), Memo(None), jobs=1)
    assert {one.item.label: one.captions[0][0] for one in found.items}["pictures/sub/b.png"] == "of b"
    (edits / "a.txt").write_text("of which a?")
    with pytest.raises(ConfigError, match=r"pictures/a.png and more/a.png share the edit a.txt") as error:
        ingest(load_recipe(recipe, choices={}), Memo(None), jobs=1)
    assert f"move it to pictures/ or more/ in {edits}" in error.value.hint
    (edits / "more").mkdir()
    (edits / "a.txt").rename(edits / "more" / "a.txt")
    found = ingest(without_caption_stop(load_recipe(recipe, choices={})), Memo(None), jobs=1)
    assert {one.item.label: one.captions[0][0] for one in found.items if one.item.name == "a.png"} == {
        "pictures/a.png": "of a", "more/a.png": "of which a?"}
    assert "orphan-caption" not in {one.code for one in found.findings}


def test_two_sources_with_the_same_names_are_edited_in_one_page(pictures, edits, tmp_path):
    draw(tmp_path / "more" / "a.png", (96, 80), seed=7)
    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[[source]]\npath = "pictures"\n[[source]]\npath = "more"\nrole = "prior"\n')
    choices = {**SMALL, "edits": edits}
    edits.mkdir()
    with viewing_source(recipe, edits, **SMALL) as server:
        names = [number(server, "a.png")]
        names.append(next(at for at in range(4) if at != names[0] and "<bdi>a.png</bdi>" in
                          server.get(f"/sample/{at}").text))
        for at in names:
            assert server.save(at, "caption", f"of {at}".encode()).status == 200
            assert server.save(at, "mask", painted()).status == 200
        assert server.undo(names[1], "mask").status == 200
        assert all(f"/sample/{at}" in server.get("/edits").text for at in names)
    assert {path.relative_to(edits).as_posix() for path in edits.rglob("a*")} > {"pictures/a.txt", "more/a.txt"}
    found = ingest(without_caption_stop(load_recipe(recipe, choices=choices)), Memo(None), jobs=1)
    told = {one.item.source: (one.captions[0][0], one.item.mask) for one in found.items if one.item.name == "a.png"}
    assert {text for text, _ in told.values()} == {f"of {at}" for at in names}
    assert sum(mask is not None and str(edits) in mask.file for _, mask in told.values()) == 1


def test_where_edits_may_be(pictures, edits, tmp_path):
    recipe = load_recipe(pictures, choices={})
    assert folder_of(pictures) == tmp_path / "pictures-edits"
    assert folder_of(tmp_path / "dataset.toml") == tmp_path / "dataset-edits"
    assert folder_of(tmp_path / "{00..09}.tar") == tmp_path / "edits"
    for folder in (pictures / "edits", tmp_path):
        with pytest.raises(PathError):
            check_folder(recipe, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(PathError, match="is a file, expected a directory"):
        check_folder(recipe, tmp_path / "file")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "latentry.json").write_text("{}")
    with pytest.raises(PathError, match="would lie in a cache"):
        check_folder(recipe, tmp_path / "cache" / "edits")


def test_tars_have_no_sidecars(tmp_path, pictures, monkeypatch):
    import tarfile

    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(pictures / "a.png", "a.png")
    recipe = load_recipe(tmp_path / "all.tar", choices={})
    with pytest.raises(UsageError, match=r"is a tar, where nothing can be written beside pictures"):
        check_editable(recipe, None)
    stored = replace(recipe, sources=(replace(recipe.sources[0], path=Bucket.parse("s3:/bucket/pictures")),))
    with pytest.raises(UsageError, match=r"pictures is in a store, where nothing can be written beside pictures"):
        check_editable(stored, None)
    with viewing_source(tmp_path / "all.tar", tmp_path / "edits", **SMALL) as server:
        assert server.save(0, "caption", b"of a tar").status == 200
        assert "<bdi>of a tar</bdi>" in server.get("/sample/0").text
        assert server.undo(0, "caption").status == 200 and "<bdi>of a tar</bdi>" not in server.get("/sample/0").text
    monkeypatch.setattr("prep.dataset.edits.places.user_cache", lambda: None)
    with pytest.raises(PathError, match="what edits replace cannot be kept: there is no home directory"):
        _ = EditPlaces(recipe=recipe, folder=None).undo


def test_numbers_of_edits_are_never_used_twice(tmp_path):
    log, other = UndoLog(Below(tmp_path / "log")), UndoLog(Below(tmp_path / "log"))
    log.add("a", "caption", b"1", b"2")
    (tmp_path / "log" / "00000002.before").write_bytes(b"of a process that was killed")
    assert other.add("b", "mask", b"3", b"4").number == 3
    assert [one.place for one in log.entries()] == ["b", "a"] and log.content(log.entries()[0]) == b"3"


def test_what_encoding_again_would_cost(prep, pictures, edits, tiny_model, tmp_path):
    (pictures / "c.txt").write_text("of c")
    words = ("--resolution", 64, "--step", 16, "--model", tiny_model, "--device", "cpu", "--quiet")
    assert prep("encode", pictures, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *words).code == 0
    choices = {"image.resolution": 64, "image.step": 16, "model.path": str(tiny_model)}
    with viewing_source(pictures, edits, cache=tmp_path / "cache", **choices) as server:
        def cells():
            return re.findall(r"<td[^>]*><bdi>(.*?)</bdi></td>", server.get("/edits?cost=yes").text, re.DOTALL)

        assert "Compare with the cache" in server.get("/edits").text
        assert [cells()[at] for at in (1, 4, 7)] == ["0", "0", "0"]
        assert server.save(number(server, "c.png"), "caption", b"other words\nand more").status == 200
        assert server.save(number(server, "a.png"), "mask", painted()).status == 200
        assert "1 caption and 1 mask changed" in server.get("/edits").text
        assert cells() == ["latent", "0", "3", "mask", "1", "0", "text", "2", "4"]
    told = json.loads(prep("encode", pictures, "--edits", edits, "--cache", tmp_path / "cache", "-o",
                           tmp_path / "m.json", *words, "--dry-run", "--json").out)
    assert told["encoded"] == {"latent": 0, "mask": 1, "text": 2}


@pytest.mark.slow
def test_the_sources_of_a_manifest(prep, pictures, edits, tiny_model, tmp_path):
    """What --edit of a manifest edits, with the options of the command that encoded it, and against its cache."""
    (pictures / "c.txt").write_text("of c")
    edits.mkdir()
    words = ("--resolution", 64, "--step", 16, "--model", tiny_model, "--device", "cpu", "--quiet")
    assert prep("encode", pictures, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *words).code == 0
    given = dict.fromkeys([*("edits", "model", "resolution", "step", "flip", "mask", "validation"), "crop"])
    asked = _sources_of(tmp_path / "m.json", {**given, "flip": "both"}, None)
    recipe, folder = _recipe(asked)
    assert (asked.what, asked.cache, folder) == (pictures, tmp_path / "cache", tmp_path / "pictures-edits")
    assert (recipe.image.resolution, recipe.image.step, recipe.image.flip) == (64, 16, "both")
    assert recipe.model.path == str(tiny_model)
    words = ("--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--device", "cpu", "--quiet")
    recipe_file = tmp_path / "dataset.toml"
    recipe_file.write_text(f'[image]\nresolution = 64\nstep = 16\n[model]\npath = "{tiny_model}"\n'
                           '[[source]]\npath = "pictures"\n')
    assert prep("encode", recipe_file, "--edits", edits, "--validation", 0.4, *words).code == 0
    asked = _sources_of(tmp_path / "m.json", given, tmp_path / "other")
    recipe, folder = _recipe(asked)
    assert (asked.what, asked.cache, folder) == (recipe_file, tmp_path / "other", edits)
    assert recipe.validation == 0.4 and recipe.edits == edits
    assert cost_of(recipe, tmp_path / "cache", jobs=1).new == {"latent": 0, "mask": 0, "text": 0}


def test_the_command(pictures):
    with viewing(pictures, "--edit", "--resolution", 64, "--step", 16) as running:
        assert running.save(0, "caption", b"by the command").status == 200
        assert running.get("/edits").text.count("--edits") == 1
        assert running.interrupt()[0] == 0
    assert len(disk_state(pictures.parent / "pictures-edits")) == 2  # the caption, and the note of it


def two_sources(small):
    """The small manifest, as of two sources and no recipe."""
    document = json.loads(small.manifest.path.read_text())
    path = small.manifest.path.with_name("two.json")
    path.write_bytes(canonical(with_checksum({**document, "sources": ["one", "two"], "recipe": None})))
    return path


def test_an_option_of_another_version():
    assert given_by(("--resolution", "512,1024", "--step", "16", "--mask", Path("m"))) == {
        "resolution": "512,1024", "step": 16, "mask": "m"}
    with pytest.raises(UsageError, match="the manifest was encoded with --new, which is no option of this version"):
        given_by(("--new", "1"))


def test_options_that_do_not_fit(prep, pictures, edits, small):
    edits.mkdir()
    result = prep("view", small.manifest.path, "--edit", "--since", "m.json")
    assert result.code == 2 and "--since is for showing a MANIFEST or RUN, but --edit shows its sources" in result.err
    result = prep("view", two_sources(small), "--edit")
    assert result.code == 5 and "does not say where its pictures are" in result.err
    assert "--sidecars is for --edit, but it is not given" in prep("view", pictures, "--sidecars").err
    both = prep("view", pictures, "--edit", "--sidecars", "--edits", edits)
    assert both.code == 2 and ("--sidecars is given beside a directory of edits, which would hide what is written"
                               in both.err)
    assert "--cache is given, but no model is known, so rows cannot be counted" in prep(
        "view", pictures, "--edit", "--cache", "c", "--quiet").err
    none = prep("view", pictures, "--edit", "--edits", "none")
    assert none.code == 2 and "--edits is none, expected a directory to write to" in none.err
    assert prep("view", pictures, "--edit", "--edits", pictures / "in").code == 5


# ---- many captions at once -------------------------------------------------------------------------------------------


def reworded(server, address):
    """What the page of a rewording shows, and the headers that it sends."""
    text = server.get(address).text
    plan = re.search(r'data-plan="(\w+)"', text)
    return text, {**server.form(0, "caption"), "x_latentry_plan": "" if plan is None else plan[1]}


def test_captions_are_reworded_at_once(server, pictures, edits):
    draw(pictures / "a.jpg", (90, 90), seed=5)  # not listed before the next start
    address = "/replace?find=of&with=picture+of&prepend=sks,+"
    text, headers = reworded(server, address)
    assert "2 captions change. Nothing is saved yet." in text and "1 sample has no caption, and stays so." in text
    assert "<ins>sks, picture</ins>" in text and not edits.exists()
    answer = server.ask("POST", f"{server.base}{address}", body=b"", **headers)
    assert (answer.status, answer.text) == (200, "Saved 2 captions.")
    assert (edits / "a.txt").read_text() == "sks, picture of a\n"
    assert (edits / "sub" / "b.txt").read_text() == "sks, one picture of b\nsks, two picture of b\n"
    answer = server.ask("POST", f"{server.base}{address}", body=b"", **headers)
    assert answer.status == 409 and "the captions are others than this page showed" in answer.text
    assert "No caption changes." in server.get("/replace?prepend=sks,+").text  # which all have already
    assert server.save(number(server, "a.png"), "caption", b"changed since").status == 200
    answer = server.ask("POST", f"{server.base}/replace/undo", body=b"", **headers)
    assert answer.text.startswith("1 caption is as before. 1 caption was not undone: the caption was changed elsewhere")
    assert (edits / "a.txt").read_text() == "changed since\n" and not (edits / "sub" / "b.txt").exists()
    assert server.ask("POST", f"{server.base}/replace/undo", body=b"", **headers).status == 409


def test_only_samples_that_are_shown_are_reworded(server, edits):
    text, headers = reworded(server, address := "/replace?q=one&prepend=x+")
    assert "1 caption changes. Nothing is saved yet." in text
    assert server.ask("POST", f"{server.base}{address}", body=b"", **headers).text == "Saved 1 caption."
    assert [path.name for path in edits.rglob("*.txt")] == ["b.txt"]
    for address, told in (("/replace?find=none", "No caption changes."), ("/replace", "Say what to find"),
                          ("/replace?prepend=x+", "1 caption changes")):  # "x one of b" begins so already
        assert told in server.get(address).text
    for text, shown in (("x" * 1001, "x" * 80), ("a%00b", "a\\x00b")):
        answer = server.get(f"/replace?find={text}")
        assert answer.status == 400
        assert f"find is '{shown}', expected at most 1000 printable characters" in html.unescape(answer.text)
    assert server.get("/replace?finds=a").status == 400


def test_a_rewording_is_sent_by_its_page_alone(server, edits):
    _, headers = reworded(server, address := "/replace?prepend=x+")
    for name in ("origin", "x_latentry_edit", "x_latentry_plan"):
        assert server.ask("POST", f"{server.base}{address}", body=b"", **{
            key: value for key, value in headers.items() if key != name}).status in (403, 409)
    assert server.get(address.replace("x+", "<script>+")).text.count("<script>") == 0 and not edits.exists()


def test_too_many_captions_at_once(server, monkeypatch):
    monkeypatch.setattr("prep.view.edit.replace.MOST", 1)
    assert "2 captions would change, at most 1 at once: search or filter first" in server.get("/replace?prepend=x").text
    monkeypatch.setattr("prep.view.edit.replace.LOOKED_AT", 1)
    assert "more than 1 samples are shown: search or filter first" in server.get("/replace?prepend=x").text
