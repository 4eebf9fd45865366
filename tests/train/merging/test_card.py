"""The card of a merged model says what was added to what; texts of others are text, and its code loads the model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from runs import go
from safetensors.torch import load_file

from train.card import escaped
from train.merging.card import Merger, card
from train.merging.directory import MergeRequest, merge

QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2, "steps": 2}
NASTY = "</td><script>x</script>\n\n# **a** [b](c) | `d` --- \\ \x1b[31m ```"


@pytest.fixture
def merger(tiny_model):
    """What was merged, without metadata."""
    return Merger(model=tiny_model, hub_id=None, base={"denoiser": "ab" * 32}, trained="lora.safetensors",
                  sha256="cd" * 32, strength=0.5, metadata={})


def front(text):
    return {key: json.loads(value) for key, value in
            (line.split(": ", 1) for line in text.split("---\n")[1].splitlines())}


def test_the_card_of_a_run_that_was_merged(make, setup_of, tmp_path):
    setup = setup_of(make(), **QUICK, seed=7, lora={"rank": 2}, result={
        "title": "Red hearts", "trigger": "a red heart", "license": "cc0-1.0", "author": "A. B.",
        "description": "Hearts, mostly red."})
    go(setup, tmp_path / "run")
    done = merge(MergeRequest(lora=tmp_path / "run", model=setup.model.path, output=tmp_path / "merged", strength=0.7))
    text = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    name = escaped(setup.model.path.name)
    for told in (f"# Red hearts, merged into {name}\n", "\nHearts, mostly red\\.\n", "**a red heart**",
                 f"| Base model | {name} |", *(f"| Fingerprint of {part} | {digest} |"
                                               for part, digest in setup.model.base.items()),
                 "| Added | lora\\.safetensors, with a strength of 0.7 |",
                 f"| SHA-256 of that file | `{done.sha256}` |",
                 f"| Manifest | {setup.manifest.digest} |", "| Steps | 2 |", "| Seed | 7 |", "| Author | A\\. B\\. |",
                 "seed = 7\n", "lora.rank = 2\n"):
        assert told in text, told
    assert front(text) == {"library_name": "diffusers", "pipeline_tag": "text-to-image", "license": "cc0-1.0",
                           "tags": ["text-to-image", "diffusers"], "instance_prompt": "a red heart"}
    assert str(tmp_path) not in text and str(setup.model.path.parent) not in text


def test_the_code_of_the_card_loads_the_model(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **QUICK, lora={"rank": 2}, optimizer={"lr": 0.05})
    go(setup, tmp_path / "run")
    merge(MergeRequest(lora=tmp_path / "run", model=setup.model.path, output=tmp_path / "merged"))
    text = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path / "merged")
    found = {"options": {"num_inference_steps": 1, "width": 64, "height": 64}}
    exec(compile(code.replace("pipeline(", "pipeline(**options, prompt="), "card", "exec"), found)
    weights = load_file(tmp_path / "merged" / "unet" / "diffusion_pytorch_model.safetensors")
    assert found["picture"].size == (64, 64)
    assert all(torch.equal(value, weights[name]) for name, value in found["pipeline"].unet.state_dict().items())


def test_a_file_of_another_program_has_what_is_known_of_it(merger):
    text = card(merger)
    assert "# lora\\.safetensors, merged into " in text and "with a strength of 0.5" in text
    assert "Manifest" not in text and "## Settings" not in text and "license" not in front(text)
    assert "base_model" not in front(text)
    text = card(replace(merger, hub_id="someone/model@main"))
    assert front(text)["base_model"] == "someone/model" and "| Base model | someone/model\\@main |" in text


def test_text_of_others_is_text(merger):
    keys = ("modelspec.title", "modelspec.description", "modelspec.trigger_phrase", "modelspec.license",
            "modelspec.author", "modelspec.date", "latentry.manifest", "latentry.recipe", "latentry.step",
            "latentry.seed")
    text = card(replace(merger, trained=NASTY, base={NASTY: NASTY}, metadata=dict.fromkeys(keys, NASTY)))
    told = front(text)["instance_prompt"]
    assert "\n" not in told and "\x1b" not in text
    markdown = re.sub(r"```python\n.*?\n```", "", text.split("---\n", 2)[2], flags=re.DOTALL)
    for special in ("<script>", "**a**", "[b](c)", "\n# **", "```"):
        assert special not in markdown
    assert all(line.count("|") - line.count("\\|") == 3 for line in markdown.splitlines() if line.startswith("| "))


@pytest.mark.parametrize("config", ["", "[]", "{", '{"steps": -1}', '{"no_such": 1}', "[" * 10**5, '{"lora": []}'])
def test_settings_that_are_not_read_any_more_are_left_out(merger, config):
    assert "## Settings" not in card(replace(merger, metadata={"latentry.config": config}))
    text = card(replace(merger, metadata={"latentry.config": '{"seed": 5, "steps": 9}'}))
    assert "## Settings\n\nThose that differ from their defaults:\n\n```toml\nsteps = 9\nseed = 5\n```" in text
