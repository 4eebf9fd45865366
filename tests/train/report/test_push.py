"""A run's result, card and samples go to the Hub, privately, and nothing else: against a server on this computer."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from hub_server import FakeHub, served
from huggingface_hub import constants
from safetensors.torch import save_file

from prep.errors import PathError
from train.card import escaped
from train.report.push import files_of

# huggingface_hub 2.4 sends files in a way that its library for HTTP would like to be another.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def run(tmp_path):
    """What `train run` leaves, as far as it matters here."""
    folder = tmp_path / "mine" / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    save_file({"a": torch.ones(3)}, folder / "lora.safetensors", {"latentry.step": "10"})
    for name in ("samples/step-000000.png", "samples/step-000010.png", "samples/step-000010.set-aside.png", "log.jsonl",
                 "checkpoints/step-000010/lora.safetensors", "manifest.json"):
        (folder / name).write_bytes(name.encode())
    (folder / "README.md").write_text("---\nlibrary_name: \"diffusers\"\n---\n\n# A cat\n\n"
                                     "![Sample pictures after 10 steps](samples/step-000010.png)\n\nIt sleeps.\n")
    (folder / "run.json").write_text(json.dumps({
        "format": "latentry/run", "version": 1, **dict.fromkeys(("manifest", "manifest_digest", "model",
                                                                 "other_encoders", "config"))}))
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    found = FakeHub()
    with served(found) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        found.address = address
        yield found


SENT = ["README.md", "lora.safetensors", "samples/step-000000.png", "samples/step-000010.png"]


def test_a_new_repository_is_private_and_has_what_is_to_be_seen(train, run, hub):
    result = train("push", run, "me/cat")
    assert result.code == 0, result.err
    assert result.out == f"{hub.address}/me/cat\n" and hub.private == {"me/cat": True}
    assert sorted(hub.files["me/cat"]) == SENT
    for name, data in hub.files["me/cat"].items():
        assert data == (run / name).read_bytes()
    assert "A cat" in hub.files["me/cat"]["README.md"].decode()
    (run / "samples" / "step-000020.png").write_bytes(b"more")
    assert train("push", run, "me/cat").code == 0 and hub.private == {"me/cat": True}
    assert hub.files["me/cat"]["samples/step-000020.png"] == b"more"
    assert sum("create" in each for each in hub.asked) == 1


def test_public_is_public_only_if_that_is_said(train, run, hub):
    assert train("push", run, "me/cat", "--public", "--no-samples").code == 0 and hub.private == {"me/cat": False}
    assert sorted(hub.files["me/cat"]) == SENT[:2]
    assert hub.files["me/cat"]["README.md"].decode().endswith("# A cat\n\nIt sleeps.\n")
    hub.files.clear()
    result = train("push", run, "me/cat")
    assert result.code == 2 and "me/cat is public, so everybody could see what is uploaded" in result.err
    assert "--public" in result.err and not hub.files
    hub.private["me/cat"] = True
    result = train("push", run, "me/cat", "--public")
    assert result.code == 0 and "note: me/cat was private before, and stays so" in result.err


def test_a_dry_run_lists_files_and_asks_nobody(train, run, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = train("push", run, "me/cat", "--dry-run")
    assert result.code == 0 and not hub.asked
    lines = result.out.splitlines()
    assert [line.split(" -> ")[1] for line in lines] == [f"{hub.address}/me/cat/blob/main/{name}" for name in SENT]
    assert "samples/step-000000.png" in lines[2] and lines[2].split()[0] == "23"
    assert "would upload 4 files" in result.err and "private if it is new" in result.err


def test_a_full_run_has_its_denoiser(run):
    (run / "lora.safetensors").unlink()
    (run / "unet").mkdir()
    save_file({"a": torch.ones(3)}, run / "unet" / "diffusion_pytorch_model.safetensors")
    (run / "unet" / "config.json").write_text("{}")
    assert [*files_of(run, samples=False).files] == ["README.md", "unet/config.json",
                                                    "unet/diffusion_pytorch_model.safetensors"]


@pytest.mark.parametrize(("status", "message"), [
    (401, "the Hub does not accept the token of this computer"),
    (403, "the token of this computer may not write to me/cat"),
    (404, "the Hub finds no me/cat, or nobody called me"),
    (409, "me/cat was made or changed by another program just now"),
    (429, "the Hub has had too many requests"),
    (400, "the Hub refused the upload to me/cat: ")])
@pytest.mark.parametrize("where", ["/api/repos/create", "/commit/"])
def test_what_the_hub_refuses_is_one_error(train, run, hub, monkeypatch, status, message, where):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # before it asks again
    hub.refused[where] = status
    result = train("push", run, "me/cat")
    assert result.code == 6 and message in result.err and "hf_good" not in result.err
    assert result.err.count("error: ") == 1 and "hint: " in result.err and "Traceback" not in result.err
    assert result.out == "" and not hub.files


def test_tokens_come_from_the_usual_place(train, run, hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    result = train("push", run, "me/cat")
    assert result.code == 6 and "does not accept the token" in result.err and "hf_bad" not in result.err
    monkeypatch.delenv("HF_TOKEN")
    result = train("push", run, "me/cat")
    assert result.code == 6 and "there is no token of the Hub on this computer" in result.err
    assert "hf auth login" in result.err and "HF_TOKEN" in result.err
    (tmp_path / "no-token").write_text("hf_good")
    assert train("push", run, "me/cat").code == 0


def test_without_a_network_that_is_said(train, run, hub, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        result = train("push", run, "me/cat")
    assert result.code == 6 and "me/cat could not be uploaded to: " in result.err and "check the network" in result.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = train("push", run, "me/cat")
    assert result.code == 6 and "me/cat cannot be uploaded to: HF_HUB_OFFLINE forbids the network" in result.err


@pytest.mark.parametrize("name", ["cat", "me/cat/more", "me/", "me/c at", "https://huggingface.co/me/cat", "../cat",
                                  "me/cat@main"])
def test_names_of_no_repository(train, run, hub, name):
    result = train("push", run, name)
    assert result.code == 2 and "expected OWNER/NAME" in result.err and not hub.asked


def test_a_run_without_a_result_is_refused(run):
    (run / "lora.safetensors").unlink()
    with pytest.raises(PathError, match=r"has no result yet, expected lora\.safetensors or unet or transformer, and"):
        files_of(run, samples=True)


@pytest.mark.parametrize("name", ["README.md", "lora.safetensors", "unet/config.json"])
def test_no_directory_of_this_computer_is_uploaded(run, monkeypatch, name):
    """Also not those of links; another name that begins alike is none."""
    home = run.parent
    monkeypatch.setattr(Path, "home", lambda: home)
    if name.startswith("unet"):
        (run / "lora.safetensors").unlink()
        (run / "unet").mkdir()
    for text, refused in ((f"{home}-elsewhere is fine", False), (f"see {home}/models/base", True)):
        if name.endswith(".safetensors"):
            save_file({"a": torch.ones(3)}, run / name, {"modelspec.description": text})
        else:
            (run / name).write_text(text)
        if refused:
            with pytest.raises(PathError, match=r"of the run names .*, which is a directory of this computer"):
                files_of(run, samples=True)
        else:
            assert name in files_of(run, samples=True).files


@pytest.mark.parametrize(("name", "spelled"), [("README.md", escaped), ("README.md", str),
                                               ("unet/config.json", json.dumps)])
def test_also_where_its_characters_are_escaped(run, monkeypatch, name, spelled):
    home = run.parent / "josé-anna_b"
    monkeypatch.setattr(Path, "home", lambda: home)
    (run / "lora.safetensors").unlink()
    (run / "unet").mkdir()
    (run / name).write_text(spelled(f"see {home}/models"))
    with pytest.raises(PathError, match=r"of the run names .*josé-anna_b, which is a directory of this computer"):
        files_of(run, samples=True)
