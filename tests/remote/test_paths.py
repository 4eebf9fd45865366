"""Each path of both command lines, given as a URL: what is in no store is refused by its name, and nothing is lost."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from prep.cli.main import app as prep_app
from prep.fs.place import ANYWHERE
from train.cli.main import app as train_app

U = "{url}/x.json"
HERE = ("--cache", "{tmp}/cache", "-o", "{tmp}/m.json", "--model", "{model}")
# By command and parameter, with the URL in its place. LOCAL: it cannot be a URL.
LOCAL = {
    "prep init other": ("--from", U), "prep init output": ("{photos}", "-o", U),
    "prep scan edits": ("{photos}", "--edits", U), "prep scan html": ("{photos}", "--html", U),
    "prep bucket html": ("{photos}", "--html", U), "prep bucket png": ("{photos}", "--png", U),
    "prep bucket edits": ("{photos}", "--edits", U),
    "prep embed edits": ("{photos}", "--model", "{model}", "--cache", "{tmp}/cache", "--edits", U),
    "prep mask output": ("{photos}", "--with", "alpha", "-o", U),
    "prep mask html": ("{photos}", "--with", "alpha", "-o", "{tmp}/masks", "--html", U),
    "prep encode edits": ("{photos}", *HERE, "--edits", U), "prep encode prompts": ("{photos}", *HERE, "--prompts", U),
    "prep seal edits": ("{photos}", *HERE, "--edits", U), "prep seal prompts": ("{photos}", *HERE, "--prompts", U),
    "prep import edits": ("{photos}", "--from", "kohya-npz", *HERE, "--edits", U),
    "prep import prompts": ("{photos}", "--from", "kohya-npz", *HERE, "--prompts", U),
    "prep prompts file": (U, "--manifest", "{home}/manifest.json"),
    "prep inspect html": ("{home}/manifest.json", "--html", U),
    "prep view edits": ("{photos}", "--edit", "--edits", U),
    "prep export output": ("{home}/manifest.json", "--to", "safetensors", "-o", U),
    "prep pack manifest": (U, "-o", "{tmp}/x.tar"), "prep pack output": ("{home}/manifest.json", "-o", U),
    "prep unpack file": (U, "{tmp}/new"), "prep unpack folder": ("{tmp}/x.tar", U),
    "prep push manifest": (U, "{url}/pushed"), "prep pull folder": ("{url}/manifest.json", U),
    "prep convert file": (U, "--config", "{model}", "-o", "{tmp}/out"),
    "prep convert output": ("{tmp}/x.safetensors", "--config", "{model}", "-o", U),
    "prep doctor directory": (U,), "prep demo directory": (U,),
    "prep caption edits": ("{photos}", "--endpoint", "http://127.0.0.1:9", "--model", "m", "--edits", U),
    "prep caption json_schema": ("{photos}", "--endpoint", "http://127.0.0.1:9", "--model", "m", "--json-schema", U),
    "prep jobs project": ("list", U), "prep studio project": (U,),
    "train resize lora": (U, "-o", "{tmp}/less.safetensors", "--rank", 2),
    "train resize output": ("{tmp}/run", "-o", U, "--rank", 2), "train push folder": (U, "me/mine"),
    "train extract output": ("{model}", "{model}", "-o", U),
    "train init output": ("-o", U),
    "train check config": ("{home}/manifest.json", "-c", U), "train run config": ("{home}/manifest.json", "-c", U),
    "train sample prompts": ("{tmp}/run", "--prompts", U), "train sample output": ("{tmp}/run", "-o", U),
    "train evaluate folder": (U,), "train evaluate html": ("{tmp}/run", "--html", U),
    "train evaluate prompts": ("{tmp}/run", "--prompts", U), "train evaluate neutral": ("{tmp}/run", "--neutral", U),
    "train merge output": ("{tmp}/run", "-o", U), "train report output": ("{tmp}/run", "-o", U),
}
URLS = {
    "prep init sources": (U, "-o", "{tmp}/d.toml"), "prep scan source": (U,), "prep bucket source": (U,),
    "prep mask source": (U, "--with", "alpha", "-o", "{tmp}/masks"),
    "prep caption source": (U, "--endpoint", "http://127.0.0.1:9", "--model", "m", "--edits", "{tmp}/edits"),
    "prep embed source": (U, "--model", "{model}", "--cache", "{tmp}/cache"),
    "prep embed cache": ("{photos}", "--model", "{model}", "--cache", U),
    "prep embed references": ("{photos}", "--model", "{model}", "--cache", "{tmp}/cache", "--references", U),
    "prep encode source": (U, *HERE), "prep seal source": (U, *HERE),
    "prep import source": (U, "--from", "kohya-npz", *HERE),
    "prep encode cache": ("{photos}", "--cache", U, "-o", "{url}/cache", "--model", "{model}"),
    "prep seal cache": ("{photos}", "--cache", U, "--model", "{model}"),
    "prep import cache": ("{photos}", "--from", "kohya-npz", "--cache", U, "--model", "{model}"),
    "prep encode output": ("{photos}", "--cache", "{tmp}/cache", "-o", U, "--model", "{model}"),
    "prep seal output": ("{photos}", "--cache", "{tmp}/cache", "-o", U, "--model", "{model}"),
    "prep import output": ("{photos}", "--from", "kohya-npz", "--cache", "{tmp}/cache", "-o", U, "--model", "{model}"),
    "prep prompts manifest": ("{tmp}/x.txt", "--manifest", U), "prep inspect manifest": (U,), "prep view what": (U,),
    "prep view manifest": ("{tmp}/run", "--manifest", U), "prep view since": ("{home}/manifest.json", "--since", U),
    "prep view cache": ("{photos}", "--edit", "--cache", U), "prep verify manifest": (U,),
    "prep diff a": (U, "{home}/manifest.json"), "prep diff b": ("{home}/manifest.json", U), "prep gc cache": (U,),
    "prep gc more": ("{url}/cache", U), "prep gc keep": ("{url}/cache", "--keep", U), "prep compact cache": (U,),
    "prep export manifest": (U, "--to", "safetensors", "-o", "{tmp}/new"),
    "prep push url": ("{tmp}/x.json", U), "prep pull url": (U, "{tmp}/new"),
    "train check manifest": (U,), "train run manifest": (U,), "train init manifest": (U, "-o", "{tmp}/t.toml"),
    "train check output": ("{home}/manifest.json", "-o", U, "--model", "{model}"),
    "train check init_from": ("{home}/manifest.json", "--init-from", U, "--model", "{model}"),
    "train run output": ("{tmp}/x.json", "-o", U), "train run init_from": ("{home}/manifest.json", "--init-from", U),
    "train sample folder": (U,), "train sample manifest": ("{tmp}/run", "--manifest", U),
    "train merge lora": (U, "-o", "{tmp}/new"), "train worst folder": (U,),
    "train worst manifest": ("{tmp}/run", "--manifest", U), "train replay folder": (U, "--step", 1),
    "train replay manifest": ("{tmp}/run", "--step", 1, "--manifest", U), "train report folder": (U,),
    "train report manifest": ("{tmp}/run", "--manifest", U),
    "train evaluate manifest": ("{tmp}/run", "--manifest", U),
    "train stop folder": (U,), "train sample_now folder": (U,),
    **{f"{command} cache": ("{home}/manifest.json", "--cache", U)
       for command in ("prep inspect", "prep verify", "train check", "train run")},
    **{f"train {command} cache": ("{tmp}/run", "--cache", U) for command in (
        "sample", "worst", "report", "evaluate")},
    "train replay cache": ("{tmp}/run", "--step", 1, "--cache", U),
    **{f"prep {command} references": ("{photos}", "--references", U) for command in ("scan", "bucket", "view")},
    **{f"prep {command} references": ("{photos}", "--references", U, *HERE) for command in ("encode", "seal")},
    "prep import references": ("{photos}", "--from", "kohya-npz", "--references", U, *HERE),
}


def test_every_path_of_both_command_lines_is_here():
    """A new one is added to LOCAL, or to URLS."""
    found = {f"{program} {one.name or one.callback.__name__} {parameter.name}"
             for program, app in (("prep", prep_app), ("train", train_app)) for one in app.registered_commands
             for parameter in inspect.signature(one.callback).parameters.values()
             if "Path" in str(parameter.annotation)}
    assert found == {*LOCAL, *URLS} and not {*LOCAL} & {*URLS}


@pytest.mark.slow
def test_a_url_keeps_its_slashes(store, small_there, photos, tiny_model, prep, train, tmp_path, monkeypatch):
    """Messages have it as it was given, and nothing is written to a directory s3: on this computer."""
    (tmp_path / "work").mkdir()
    (tmp_path / "x.txt").write_text("a red circle")
    monkeypatch.chdir(tmp_path / "work")
    places = {"url": store.url, "tmp": tmp_path, "home": small_there, "photos": photos, "model": tiny_model}
    for name, words in {**LOCAL, **URLS}.items():
        program, command, _ = name.split()
        done = {"prep": prep, "train": train}[program](command, *(str(word).format(**places) for word in words))
        assert done.code != 70 and not Path("s3:").exists(), (name, done.err)
        assert "s3:/" not in (done.out + done.err).replace("s3://", ""), name
        if name in LOCAL:
            refused = f"{U.format(url=store.url)} is in an object store" in done.err.splitlines()[0]
            assert done.code in (2, 5) and refused, (name, done.err)
            assert not list(Path().rglob("*")) and not (tmp_path / "m.json").exists(), name


@pytest.mark.parametrize(("section", "role"), [("[prompts]\nfile", "prompt file"), ("[edits]\nfrom", "edits")])
def test_recipes_name_only_pictures_in_stores(prep, photos, tmp_path, section, role):
    recipe = tmp_path / "set.toml"
    recipe.write_text(f'{section} = "s3://bucket/x"\n[[source]]\npath = "photos"\n')
    done = prep("scan", recipe)
    assert done.code == 5 and done.err == (
        f"error: {role} s3://bucket/x is in an object store, expected a path on this computer\n"
        f"hint: {ANYWHERE}\n")
