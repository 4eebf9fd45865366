"""Captions that a model made, in the pages: beside a person's, accepted, and rejected, so that it is asked again."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from chat_server import ChatServer
from crashes import Crashed, Disk, state
from pictures import draw
from PIL import Image
from viewing import viewing_source

from prep.dataset.edits.log import UndoLog
from prep.dataset.edits.places import EditPlaces
from prep.dataset.edits.refused import Refused
from prep.fs.below import Below
from prep.progress import silent
from prep.recipe.load import load_recipe
from prep.recipe.options import without_caption_stop
from prep.view.edit.editor import Editor, Edits, Sent
from prep.view.source.origins import Origins
from prep.view.source.state import SourceSet
from prep.view.source.survey import survey_source

SMALL = {"image.resolution": 64, "image.step": 16, "image.shortest": 32}


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "remembered"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def photos(tmp_path):
    """a.png without a caption, b.png with one."""
    draw(tmp_path / "photos" / "a.png", (96, 80), seed=1)
    draw(tmp_path / "photos" / "b.png", (80, 96), seed=2).with_suffix(".txt").write_text("by hand")
    return tmp_path / "photos"


@pytest.fixture
def edits(photos):
    return photos.with_name("photos-edits")


@pytest.fixture
def chat():
    """Says "a 0" of a.png, then "a 1", and of b.png "b 0"."""
    times = Counter[str]()

    def answer(request, before):
        width, height = Image.open(io.BytesIO(request.picture)).size
        name = "a" if width > height else "b"
        times[name] += 1
        return f"{name} {times[name] - 1}"

    with ChatServer(answer) as server:
        yield server


@pytest.fixture
def asked(prep, photos, chat):
    """Asks a model as a user does; the report."""
    def ask(*options):
        result = prep("caption", photos, "--endpoint", chat.url, "--model", "<tiny>", "--jobs", 1, "--json", *options)
        assert result.code == 0, result.err
        return json.loads(result.out)

    ask("--replace")
    return ask


def card(server, name, path="/"):
    """The card of a picture in the list, and the number of its sample; (None, "") if it is not there."""
    for text in server.get(path).text.split('<li class="card')[1:]:
        text = text.partition("</form>")[0]
        found = re.search(r'/sample/(\d+)[^"]*"><bdi>(.*?)</bdi>', text)
        if found and found[2].replace("<wbr>", "") == name:
            return int(found[1]), text
    return None, ""


def judge(server, verdict, number, **headers):
    return server.ask("POST", f"{server.base}/{verdict}/{number}/caption", body=b"",
                      **{**server.form(number, "caption"), **headers})


def names(server, path):
    return sorted(name.replace("<wbr>", "") for name in
                  re.findall(r'<p class="name"><a href="[^"]*"><bdi>(.*?)</bdi>', server.get(path).text))


def test_an_accepted_caption_is_a_persons(asked, photos, edits, chat):
    with viewing_source(photos, edits, **SMALL) as server:
        at, text = card(server, "a.png")
        assert "Made by <bdi>&lt;tiny&gt;</bdi>: <span class=\"state\">to look at</span>" in text
        assert f'data-accept="{server.base}/accept/{at}/caption"' in text and "accept-all" in server.get().text
        before = (edits / "a.txt").read_text()
        answer = judge(server, "accept", at)
        assert (answer.status, answer.text) == (200, "Accepted: prep caption keeps it.")
        assert answer.headers["x-latentry-undo"] == "yes" and (edits / "a.txt").read_text() == before
        assert ">accepted</span>" in card(server, "a.png")[1] and "data-accept" not in card(server, "a.png")[1]
        again = judge(server, "accept", at)
        assert again.status == 409 and "a.txt is not what a model wrote, or is accepted already" in again.text
        assert judge(server, "again", at).status == 409
        assert "caption accepted" in server.get("/edits").text
        assert asked("--prompt", "other")["kept"] == 1 and (edits / "a.txt").read_text() == before
        assert server.undo(at, "caption").text == "a.txt is as the model wrote it, and not accepted."
        assert ">to look at</span>" in card(server, "a.png")[1]
    assert asked("--prompt", "other")["kept"] == 0 and (edits / "a.txt").read_text() == "a 1\n"


def test_a_rejected_caption_is_asked_again(asked, photos, edits, chat):
    with viewing_source(photos, edits, **SMALL) as server:
        a, b = card(server, "a.png")[0], card(server, "b.png")[0]
        answer = judge(server, "again", a)
        assert (answer.status, answer.text) == (200, "Rejected: a.txt is as before, and prep caption will ask again.")
        assert not (edits / "a.txt").exists() and (edits / "b.txt").exists()
        text = card(server, "a.png")[1]
        assert "rejected: asked again" in text and "a 0" in text and "(nothing)" in text
        assert "1 caption was rejected: prep caption asks about it again." in server.get().text
        assert "<code>prep caption SOURCE --model &#39;&lt;tiny&gt;&#39;</code><button" in server.get().text
        assert server.undo(a, "caption").status == 200 and (edits / "a.txt").read_text() == "a 0\n"
        assert ">to look at</span>" in card(server, "a.png")[1] and "was rejected" not in server.get().text
        assert judge(server, "again", a).status == judge(server, "again", b).status == 200
    report = asked("--dry-run")
    assert (report["again"], report["asked"], report["kept"]) == (2, 2, 0)  # also about the one that has a person's
    assert len(chat.asked) == 2
    report = asked()
    assert (report["again"], report["asked"], report["written"]) == (2, 2, 2)
    assert (edits / "a.txt").read_text() == "a 1\n" and (edits / "b.txt").read_text() == "b 1\n"
    report = asked()
    assert (report["again"], report["asked"], report["made"]) == (0, 0, 2)  # the new answers are remembered
    with viewing_source(photos, edits, **SMALL) as server:
        assert judge(server, "again", a).status == 200
    assert asked()["asked"] == 1 and (edits / "a.txt").read_text() == "a 2\n"  # and rejected ones never used again


def test_what_a_person_writes_instead_is_not_asked_about(asked, photos, edits, chat, prep):
    with viewing_source(photos, edits, **SMALL) as server:
        at = card(server, "a.png")[0]
        assert judge(server, "again", at).status == 200 and server.save(at, "caption", b"mine").status == 200
        assert "state" not in card(server, "a.png")[1]
    assert asked()["kept"] == 1 and (edits / "a.txt").read_text() == "mine\n"
    told = prep("caption", photos, "--endpoint", chat.url, "--model", "<tiny>", "--jobs", 1)
    assert "asked about again" not in told.out


def test_how_many_are_asked_again_is_said(asked, photos, edits, chat, prep):
    with viewing_source(photos, edits, **SMALL) as server:
        assert judge(server, "again", card(server, "a.png")[0]).status == 200
    told = prep("caption", photos, "--endpoint", chat.url, "--model", "<tiny>", "--jobs", 1)
    assert "1 caption written, 1 answer asked for, 0 existing kept, 1 made before, 1 asked about again" in told.out


def test_model_and_person_side_by_side(asked, photos, edits):
    """What a model replaced, also where it lies beside the picture, and what a person made of a model's caption."""
    def versions(text):
        return [(who, re.findall(r"<bdi>(.*?)</bdi></dd>", rest)) for who, rest in
                re.findall(r"<dt>(.*?)</dt>(.*?)</div>", text.partition('class="versions"')[2], re.DOTALL)]

    with viewing_source(photos, edits, **SMALL) as server:
        a, (b, text) = card(server, "a.png")[0], card(server, "b.png")
        assert versions(text) == [("model", ["b 0"]), ("before", ["by hand"])]
        assert versions(server.get(f"/sample/{b}").text) == versions(text)
        assert not versions(card(server, "a.png")[1])  # there was nothing
        for words in (b"half a <b>", b"an answer\nand more"):
            assert server.save(a, "caption", words).status == 200
        assert versions(card(server, "a.png")[1]) == [("model", ["a 0"]),
                                                      ("a person", ["an answer", "and more"])]
        assert server.undo(a, "caption").status == 200
        assert versions(server.get(f"/sample/{a}").text)[1] == ("a person", ["half a &lt;b&gt;"])
    with viewing_source(photos, edits, **SMALL) as server:
        assert judge(server, "accept", b).status == 200
        assert asked("--replace", "--prompt", "in short")["written"] == 2
    with viewing_source(photos, edits, **SMALL) as server:  # the accepted caption counts as a person's
        assert versions(card(server, "b.png")[1]) == [("model", ["b 1"]), ("before", ["b 0"])]
    with viewing_source(photos, edits, read_only=True, **SMALL) as server:  # read-only
        assert "by &lt;tiny&gt;, to look at" in server.get().text and "data-accept" not in server.get().text
        assert versions(server.get(f"/sample/{b}").text)[1] == ("before", ["b 0"])


def test_filters_by_origin(asked, photos, edits):
    draw(photos / "c.png", (96, 96), seed=3).with_suffix(".txt").write_text("a person's alone")
    with viewing_source(photos, edits, **SMALL) as server:
        a, b = card(server, "a.png")[0], card(server, "b.png")[0]
        assert names(server, "/?made=look") == names(server, "/?made=model") == ["a.png", "b.png"]
        assert judge(server, "accept", a).status == 200 and server.save(b, "caption", b"mine").status == 200
        for made, shown in (("look", []), ("accepted", ["a.png"]), ("changed", ["b.png"]), ("again", []),
                            ("model", ["a.png", "b.png"])):
            assert names(server, f"/?made={made}") == shown, made
        assert server.undo(a, "caption").status == 200 and judge(server, "again", a).status == 200
        assert names(server, "/?made=again") == ["a.png"] and names(server, "/?made=model") == ["b.png"]
        assert "rejected (1)" in server.get().text and server.get("/?made=other").status == 400
    with viewing_source(photos, photos.with_name("none"), **SMALL) as server:
        assert names(server, "/?made=model") == [] and 'name="made"' not in server.get().text


def test_a_verdict_on_what_the_page_did_not_show(asked, photos, edits):
    with viewing_source(photos, edits, **SMALL) as server:
        at = card(server, "a.png")[0]
        stale = server.form(at, "caption")
        (edits / "a.txt").write_text("changed by another program\n")
        before = state(edits)
        for verdict in ("accept", "again"):
            answer = judge(server, verdict, at, **stale)
            assert answer.status == 409 and "was changed elsewhere since this page was loaded" in answer.text
            assert judge(server, verdict, at).status == 409  # and what is there is no model's
            assert judge(server, verdict, at, x_latentry_sample="0" * 64).status == 409
        assert state(edits) == before


def test_a_verdict_is_sent_by_its_page_alone(asked, photos, edits):
    with viewing_source(photos, edits, **SMALL) as server:
        at, before = card(server, "a.png")[0], state(edits)
        form = server.form(at, "caption")
        for verdict in ("accept", "again"):
            path = f"{server.base}/{verdict}/{at}"
            for name in ("origin", "x_latentry_edit"):
                left = {key: value for key, value in form.items() if key != name}
                assert server.ask("POST", f"{path}/caption", body=b"", **left).status == 403
            assert judge(server, verdict, at, origin="http://evil.example").status == 403
            assert server.ask("POST", f"{path}/mask", body=b"", **form).status == 404
            assert server.ask("GET", f"{path}/caption").status == 405
        assert state(edits) == before
    with viewing_source(photos, **SMALL) as server:
        assert server.ask("POST", f"{server.base}/accept/{at}/caption", body=b"", **{
            **form, "origin": f"http://127.0.0.1:{server.port}"}).status == 405


def test_a_rejection_that_would_leave_the_picture_out(asked, photos, edits):
    with viewing_source(photos, edits, **SMALL, **{"caption.missing": "reject"}) as server:
        answer = judge(server, "again", card(server, "a.png")[0])
        assert answer.status == 400 and "(--missing-caption reject): start with --missing-caption empty" in answer.text
    assert (edits / "a.txt").exists()


def test_what_a_model_replaced_is_lost(asked, photos, edits):
    asked("--prompt", "in short", "--replace")  # b.txt: a model's, over a model's, over nothing in the edits
    with viewing_source(photos, edits, **SMALL) as server:
        b = card(server, "b.png")[0]
        assert server.save(b, "caption", b"mine").status == 200
    asked("--replace")
    for path in (edits / ".undo").glob("*.before"):
        path.write_bytes(b"other")
    with viewing_source(photos, edits, **SMALL) as server:
        assert 'class="versions"' not in card(server, "b.png")[1]
        answer = judge(server, "again", b)
        assert answer.status == 409 and "what the edit replaced is damaged" in answer.text


def open_editor(photos, edits):
    recipe = replace(without_caption_stop(load_recipe(photos, choices={**SMALL})), edits=edits)
    source = SourceSet(survey_source(recipe, jobs=1, scan=False, progress=silent))
    editor = Editor(source, Edits(places=EditPlaces(recipe=recipe, folder=edits), command=""), lambda data, _: data)
    return source, editor, Origins(source, editor.places, editor.log)


def sent(source, editor, at):
    return Sent(number=at, kind="caption", sample=source.state.seats[at].id, media="text/plain", body=b"",
                version=editor.editable(at, "caption").version)


@pytest.mark.parametrize("verdict", ["accept", "ask_again"])
def test_a_kill_at_each_change_of_the_disk(asked, photos, edits, monkeypatch, verdict):
    """A verdict is there or not, and so is what it does; either way it can be undone or given anew."""
    source, editor, origins = open_editor(photos, edits)
    at = next(at for at, seat in enumerate(source.state.seats) if seat.item.item.name == "a.png")
    done = {"accept": ("accepted", True), "ask_again": ("again", False)}[verdict]
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        getattr(editor, verdict)(sent(source, editor, at))
        editor.undo(sent(source, editor, at))
    assert len(disk.seen) > 4 and (edits / "a.txt").read_text() == "a 0\n"
    for stop in range(len(disk.seen)):
        with monkeypatch.context() as patched:
            disk = Disk(patched)
            disk.left = stop
            with pytest.raises(Crashed):
                getattr(editor, verdict)(sent(source, editor, at))
                editor.undo(sent(source, editor, at))
        source, editor, origins = open_editor(photos, edits)
        found = origins.of([at])[at].state, (edits / "a.txt").exists()
        assert found in (done, ("look", True)), stop
        if found == done:
            editor.undo(sent(source, editor, at))
        assert origins.of([at])[at].state == "look" and (edits / "a.txt").read_text() == "a 0\n"


def test_verdicts_of_two_programs(asked, photos, edits):
    """Each sees what the other did, at the latest when it judges."""
    source, editor, origins = open_editor(photos, edits)
    other_source, other, _ = open_editor(photos, edits)
    at = next(at for at, seat in enumerate(source.state.seats) if seat.item.item.name == "a.png")
    stale = sent(other_source, other, at)
    editor.accept(sent(source, editor, at))
    for judge in (other.accept, other.ask_again):
        with pytest.raises(Refused, match="accepted already"):
            judge(stale)
    other.undo(stale)
    assert origins.of([at])[at].state == "look"
    editor.ask_again(sent(source, editor, at))
    with pytest.raises(Refused, match="was changed elsewhere"):
        other.accept(stale)


def test_a_log_without_verdicts_stays_readable(asked, edits):
    log = UndoLog(Below(edits, (".undo",)))
    documents = [json.loads(path.read_text()) for path in sorted((edits / ".undo").glob("*.json"))]
    assert [document["version"] for document in documents] == [1, 1] and "verdict" not in documents[0]
    entry = log.add("a.txt", "caption", b"1", b"1", verdict="accepted")
    assert json.loads((edits / ".undo" / f"{entry.number:08}.json").read_text())["version"] == 2
    assert not (edits / ".undo" / f"{entry.number:08}.before").exists()
    assert log.entries()[0] == UndoLog(Below(edits, (".undo",))).entries()[0] == entry
    path = edits / ".undo" / f"{entry.number:08}.json"
    for change in ({"version": 1}, {"version": 3}, {"verdict": "other"}, {"verdict": ""}):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert len(log.entries()) == 2, change
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "verdict": "accepted"}))
