"""`prep caption` as a user types it: which pictures are asked about, where captions go, and what a second run asks."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from chat_server import ChatServer, Reply, completion, failure
from crashes import Crashed, Disk, state
from pictures import draw
from PIL import Image
from viewing import viewing_source

from prep.cli.main import app
from prep.dataset.edits.log import UndoLog
from prep.fs.below import Below
from prep.recipe.load import load_recipe


def call(server, source, *options):
    return ("caption", source, "--endpoint", server.url, "--model", "tiny", "--jobs", 1, *options)


def named(request, before):
    """An answer that tells pictures apart."""
    return f"gray {np.asarray(Image.open(io.BytesIO(request.picture))).mean():.0f}"


def texts(folder: Path):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.txt"))}


@pytest.fixture
def edits(bare):
    return bare.with_name("photos-edits")


def test_pictures_without_a_caption_get_one_in_the_edits(prep, bare, edits):
    before = state(bare)
    with ChatServer(named) as server:
        result = prep(*call(server, bare))
    assert result.code == 0 and state(bare) == before  # nothing is written among the pictures
    assert set(texts(edits)) == {"0.txt", "4.txt", "10_grey_cats/2.txt", "10_grey_cats/3.txt"}
    assert texts(edits)["0.txt"] == texts(edits)["4.txt"] != texts(edits)["10_grey_cats/2.txt"]
    assert len(server.asked) == 3  # two have the same bytes
    assert result.out.startswith(f"{edits}: 4 captions written, 3 answers asked for, 1 existing kept (--replace "
                                 "replaces them)\n")
    where = server.url.removesuffix("/v1")
    assert result.err == (f"note: 3 pictures will be sent to {where} (this computer), model tiny: 3 requests, 8 at a "
                          "time, each with a JPEG of at most 1024 pixels a side, about 4.5 KiB in all\n")
    assert load_recipe(bare, choices={}).edits == edits  # the next command uses them


def test_what_is_sent_is_scaled_down_and_has_no_transparency(prep, tmp_path):
    draw(tmp_path / "photos" / "a.png", (300, 200), seed=1, alpha=True)
    with ChatServer() as server:
        assert prep(*call(server, tmp_path / "photos", "--side", 64, "--prompt", "what in {folder}?")).code == 0
    (request,) = server.asked
    picture = Image.open(io.BytesIO(request.picture))
    assert (picture.format, picture.size, picture.mode) == ("JPEG", (64, 42), "RGB")
    assert not picture.getexif() and request.prompt == "what in photos?"


def test_a_second_run_asks_nothing(prep, bare, edits):
    with ChatServer(named) as server:
        prep(*call(server, bare))
        before, asked = state(edits), len(server.asked)
        again = prep(*call(server, bare))
        assert (again.code, again.err) == (0, "") and state(edits) == before
        assert again.out == (f"{edits}: 0 captions written, 0 answers asked for, 1 existing kept (--replace replaces "
                             "them), 4 made before\n")
        shutil.rmtree(edits)  # what models said is remembered, too
        assert "4 captions written, 0 answers asked for" in prep(*call(server, bare, "--edits", edits)).out
        assert state(edits).keys() == before.keys() and len(server.asked) == asked
        (bare / "4.png").write_bytes((bare / "1.png").read_bytes())  # another picture, of known bytes no answer
        assert "1 caption written, 1 answer asked for" in prep(*call(server, bare)).out


@pytest.mark.parametrize("differs", [("--prompt", "name it"), ("--side", 50), ("--max-tokens", 9),
                                     ("--temperature", 0.5), ("--model", "other")])
def test_other_words_ask_again_and_replace_what_a_model_made(prep, bare, edits, differs):
    with ChatServer(lambda request, before: f"answer {before}") as server:
        prep(*call(server, bare))
        first = texts(edits)
        result = prep(*call(server, bare, *differs))
        assert "4 captions written, 3 answers asked for" in result.out and len(server.asked) == 6
        assert set(texts(edits)) == set(first) and not set(texts(edits).values()) & set(first.values())
        assert "4 captions written, 0 answers asked for" in prep(*call(server, bare)).out and texts(edits) == first


def test_what_a_person_wrote_stays_unless_it_is_to_be_replaced(prep, bare, edits):
    with ChatServer() as server:
        prep(*call(server, bare))
        (edits / "0.txt").write_text("edited by hand\n")
        kept = prep(*call(server, bare, "--model", "other"))
        assert "2 existing kept" in kept.out and (edits / "0.txt").read_text() == "edited by hand\n"
        assert not (edits / "1.txt").exists()
        replaced = prep(*call(server, bare, "--model", "other", "--replace", "--template", "{old}, {caption}"))
    assert "0 existing kept, 0" not in replaced.out and texts(edits)["0.txt"] == "edited by hand, a picture\n"
    assert texts(edits)["1.txt"] == "written by hand, a picture\n"
    assert (bare / "1.txt").read_text() == "written by hand\n"


@pytest.mark.parametrize(("option", "text"), [("--template", "\x01{caption}"), ("--trigger", "a\x07")])
def test_words_that_no_caption_can_have_are_refused(prep, bare, edits, option, text):
    with ChatServer() as server:
        result = prep(*call(server, bare, option, text))
        assert result.code == 2 and f"{option} has 1 control character, expected plain text" in result.err
        assert prep(*call(server, bare, "--trigger", "two\nwords")).code == 0
    assert texts(edits)["0.txt"] == "two words, a picture\n"


def test_a_name_that_no_caption_can_have_costs_one_picture(prep, bare, edits):
    (bare / "4.png").rename(bare / "4\x01.png")
    with ChatServer() as server:
        result = prep(*call(server, bare, "--template", "{name}, {caption}"))
    assert "caption-control-characters" in result.out and "from the names of its file or directory" in result.out
    assert set(texts(edits)) == {"0.txt", "10_grey_cats/2.txt", "10_grey_cats/3.txt"}


def test_an_answer_that_leaves_nothing_is_not_written(prep, bare, edits):
    with ChatServer(lambda *_: ",") as server:
        result = prep(*call(server, bare, "--template", "{caption},"))
    assert "empty-caption" in result.out and "the model said ','" in result.out and not edits.exists()


def test_what_separates_fixed_tags_stays(prep, bare, edits):
    (bare / "1.txt").write_text("sks ||| a, b\n")
    with ChatServer() as server:
        assert prep(*call(server, bare, "--replace", "--template", "{old}, {caption}")).code == 0
    assert texts(edits)["1.txt"] == "sks ||| a, b, a picture\n"


def test_captions_of_before_do_not_pile_up(prep, bare, edits):
    """{old} is what a person wrote, also once a model has replaced it."""
    words = ("--replace", "--template", "{old}, {caption}")
    with ChatServer(lambda request, before: request.document["model"]) as server:
        for model in ("one", "two", "two", "three"):
            prep(*call(server, bare, *words, "--model", model))
            assert texts(edits)["1.txt"] == f"written by hand, {model}\n"
        assert len(server.asked) == 4 * 3
    log = [entry for entry in UndoLog(Below(edits, (".undo",))).entries() if entry.place == "1.txt"]
    assert texts(edits)["0.txt"] == "three\n" and [entry.by for entry in log] == ["three", "two", "one"]


def test_captions_of_tables_are_kept_too(prep, bare, edits):
    (bare / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "of the table"}) + "\n")
    with ChatServer() as server:
        assert "2 existing kept" in prep(*call(server, bare)).out and "0.txt" not in texts(edits)


def test_a_caption_in_a_table_is_not_hidden_by_that_of_another_picture_with_its_name(prep, bare, edits):
    (bare / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "of the table"}) + "\n")
    draw(bare / "0.jpg", (96, 64), seed=9)
    with ChatServer() as server:
        result = prep(*call(server, bare))
    assert result.code == 1 and "its caption would also be that of 0.png, which a person wrote" in result.out
    assert "0.txt" not in texts(edits) and "4.txt" in texts(edits)


def test_sidecars_on_request(prep, bare, edits):
    with ChatServer() as server:
        result = prep(*call(server, bare, "--sidecars"))
        assert result.out.startswith("beside the pictures: 4 captions written") and not edits.exists()
        assert texts(bare) == {"0.txt": "a picture\n", "1.txt": "written by hand\n", "4.txt": "a picture\n",
                               "10_grey_cats/2.txt": "a picture\n", "10_grey_cats/3.txt": "a picture\n"}
        assert "4 made before" in prep(*call(server, bare, "--sidecars")).out


def test_a_recipe_names_the_captions_afterwards(prep, bare, tmp_path):
    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[[source]]\npath = "photos"\n')
    with ChatServer() as server:
        result = prep(*call(server, recipe))
    assert "dataset.toml now names the edits: [edits]." in result.err
    assert recipe.read_text().endswith('\n[edits]\nfrom = "dataset-edits"\n')
    assert len(texts(tmp_path / "dataset-edits")) == 4


def test_pages_show_who_made_a_caption_and_undo_it(prep, bare, edits):
    with ChatServer() as server:
        prep(*call(server, bare, "--model", "org/<Tiny>-VL"))
    small = {"image.resolution": 64, "image.step": 16, "image.shortest": 32}
    with viewing_source(bare, edits, **small) as pages:
        made = {page: "Made by <bdi>org/&lt;Tiny&gt;-VL</bdi>" in pages.get(f"/sample/{page}").text.replace("<wbr>", "")
                for page in range(5)}
        assert pages.get("/edits").text.count("caption created by org/&lt;Tiny&gt;-VL") == 4
        at = next(page for page in range(5) if made[page])
        assert sum(made.values()) == 4
        assert pages.save(at, "caption", b"by hand\n").status == 200
        assert 'class="state">changed by a person</span>' in pages.get(f"/sample/{at}").text


def test_several_prompts_make_several_captions(prep, bare, edits):
    with ChatServer(lambda request, before: f"{request.prompt}!") as server:
        prompts = ("--prompt", "short {name}", "--prompt", "long", "--prompt", "short {name}")
        result = prep(*call(server, bare, *prompts, "--template", "{folder}, {caption}, {old}", "--trigger", "sks"))
    assert result.code == 0 and len(server.asked) in (7, 8)  # two have the same bytes, but other names
    assert texts(edits)["10_grey_cats/2.txt"] == "sks, grey cats, short 2!\nsks, grey cats, long!\n"
    assert texts(edits)["0.txt"] == "sks, photos, short 0!\nsks, photos, long!\n"


def test_a_limit_shows_what_comes_out(prep, bare, edits):
    with ChatServer(named) as server:
        result = prep(*call(server, bare, "--limit", 2))
    first, *shown = result.out.splitlines()
    assert "2 captions written" in first and "2 left by --limit" in first and len(shown) == len(texts(edits)) == 2


def test_a_dry_run_asks_and_writes_nothing(prep, bare, edits, tmp_path):
    with ChatServer() as server:
        result = prep(*call(server, bare, "--dry-run"))
        assert not server.asked and not edits.exists() and not (tmp_path / "remembered").exists()
    assert result.out == (f"{edits}: 4 pictures would get a caption, 3 answers would be asked for, 1 existing kept "
                          "(--replace replaces them)\n") and "3 pictures will be sent to" in result.err


def test_bad_pictures_and_bad_answers_are_findings(prep, bare, edits):
    (bare / "5.png").write_bytes(b"no picture")
    (bare / "6.png").write_bytes((bare / "0.png").read_bytes()[:-40])
    said = {"0": "I'm sorry, but I cannot describe people.", "2": completion("a cat on", "length"),
            "3": "a \x07 bell", "4": failure("no")}

    def rule(request, before):
        name = request.prompt[-1]
        return Reply(status=500 if name == "4" else 200, body=said.get(name, "a picture"))

    with ChatServer(rule) as server:
        words = ("--prompt", "of {name}", "--retries", 0, "--concurrency", 1)
        result = prep(*call(server, bare, *words, "--json"))
        codes = {(one["path"], one["code"]) for one in result.json["findings"]}
        assert codes == {("5.png", "not-an-image"), ("6.png", "truncated"), ("0.png", "caption-refused"),
                         ("10_grey_cats/2.png", "caption-cut"), ("10_grey_cats/3.png", "caption-control-characters"),
                         ("4.png", "not-captioned")}
        assert result.code == 1 and set(texts(edits)) == {"10_grey_cats/2.txt"}
        asked, said["4"] = len(server.asked), "a picture"
        server.rule = lambda request, before: "a picture"
        again = prep(*call(server, bare, *words))
        assert len(server.asked) == asked + 1 and again.code == 0  # refusals are remembered
        assert prep(*call(server, bare, *words, "--strict")).code == 1


def test_the_same_words_for_many_pictures(prep, bare):
    for number in range(3):
        draw(bare / f"more{number}.png", (64, 64), seed=20 + number)
    with ChatServer(lambda *_: "an image") as server:
        found = prep(*call(server, bare, "--json")).json["findings"]
    assert {one["code"] for one in found} == {"caption-repeated"} and len(found) == 7
    assert found[0]["detail"] == "'an image', as of 6 other pictures" and found[0]["severity"] == "warning"


def test_captions_that_the_recipes_model_does_not_read_whole(prep, bare, tiny_model, tmp_path):
    recipe = tmp_path / "dataset.toml"
    recipe.write_text(f"[[source]]\npath = 'photos'\n[model]\npath = '{tiny_model}'\n")
    with ChatServer(lambda request, before: "word " * (100 if request.prompt == "2" else before)) as server:
        found = prep(*call(server, recipe, "--prompt", "{name}", "--json")).json["findings"]
        assert [(one["path"], one["code"]) for one in found] == [("10_grey_cats/2.png", "caption-over-limit")]
        recipe.write_text("[[source]]\npath = 'photos'\n[model]\npath = 'org/elsewhere'\n")
        result = prep(*call(server, recipe, "--prompt", "{name}!"))
    assert result.code == 0 and "note: tokens of captions were not counted: " in result.err


def test_an_error_keeps_what_was_answered(prep, bare, edits):
    with ChatServer(lambda request, before: "a picture" if before < 2 else Reply(status=401)) as server:
        result = prep(*call(server, bare, "--concurrency", 1))
        assert result.code == 6 and "refuses with status 401" in result.err
        assert len(texts(edits)) >= 1
        server.rule = lambda *_: "a picture"
        assert "1 answer asked for" in prep(*call(server, bare)).out and len(texts(edits)) == 4


def test_a_caption_that_is_written_meanwhile_stays(prep, bare, edits):
    def rule(request, before):
        edits.mkdir(exist_ok=True)
        (edits / "0.txt").write_text("quicker\n")
        return "a picture"

    with ChatServer(rule) as server:
        result = prep(*call(server, bare))
    assert "0.txt was written by another program meanwhile, and stays" in result.out and result.code == 1
    assert texts(edits)["0.txt"] == "quicker\n"


def test_a_kill_at_each_change_of_the_disk(prep, bare, edits, monkeypatch):
    """Captions are whole or not there, and the same command completes them, asking only what it had not noted."""
    with ChatServer(named) as server:
        words = [str(word) for word in call(server, bare, "--limit", 1, "--quiet", "--edits", edits)]
        prep(*words)  # which remembers the answer
        shutil.rmtree(edits)
        with monkeypatch.context() as patched:
            disk = Disk(patched)
            prep(*words)
        ((name, wanted),) = texts(edits).items()
        assert len(disk.seen) > 5
        for stop in range(len(disk.seen)):
            shutil.rmtree(edits)
            with monkeypatch.context() as patched:
                disk = Disk(patched)
                disk.left = stop
                with pytest.raises(Crashed):
                    app(words, standalone_mode=False)
            assert texts(edits) in ({}, {name: wanted}), stop
            assert prep(*words).code == 0 and texts(edits)[name] == wanted, stop
            assert UndoLog(Below(edits, (".undo",))).entries()[0].by == "tiny"
        assert len(server.asked) == 1


INTERRUPTED = "from prep.cli.main import main; main()"


@pytest.mark.parametrize("half", [False, True])
def test_ctrl_c_ends_it_within_seconds(bare, edits, half):
    with ChatServer(lambda request, before: Reply(hangs=True, half=half) if before else "a picture") as server:
        words = [*map(str, call(server, bare, "--concurrency", 1)), "--retries", "9"]
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, *words], stderr=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, env=os.environ.copy())
        while not (server.hung.wait(60) and texts(edits)):
            time.sleep(0.01)
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130 and time.monotonic() - since < 3, err
    assert out == "" and err.endswith("interrupted; finished work is kept. Run the same command again to continue\n")
    assert set(texts(edits).values()) == {"a picture\n"} and not list(edits.rglob("*.partial"))


@pytest.mark.parametrize(("words", "message"), [
    (("--prompt", "of {cat}"), "--prompt has '{cat}', expected one of: {folder}, {name}, {old}"),
    (("--template", "{captoin}"), "--template has '{captoin}', expected one of: {caption}, {folder}, {name}, {old}; "
     "did you mean 'caption'?"),
    (("--template", "a photo"), "--template is 'a photo', expected one with {caption}, which is what the model says"),
    (("--endpoint", "nowhere"), "--endpoint is 'nowhere', expected an address like http://localhost:8000/v1"),
    (("--edits", "none"), "--edits is none, expected a directory to write to")])
def test_words_that_are_refused(prep, bare, words, message):
    with ChatServer() as server:
        result = prep(*call(server, bare, *words))
        assert result.code == 2 and message in result.err and not server.asked


def test_what_is_missing(prep, bare):
    result = prep("caption", bare)
    assert result.code == 2 and "--model is missing: what should describe the pictures?" in result.err


def test_a_directory_that_cannot_be_written(prep, bare, edits, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prep.fs.below.Folder.write", full)
    with ChatServer() as server:
        result = prep(*call(server, bare))
    assert result.code == 5 and "No space left on device" in result.err and "cannot write caption" in result.err
