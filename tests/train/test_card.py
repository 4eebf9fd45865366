"""The model card: true, escaped, and the same for the same run; its code loads the result."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from runs import go

from prep.models.families.registry import FAMILIES
from prep.models.family import Labels
from train.card import card, escaped
from train.setup import Origin

QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2, "steps": 2}
NASTY = "</td><script>x</script> **a** [b](c) | `d` # --- \\"


def text_of(run):
    return (run / "README.md").read_text(encoding="utf-8")


def test_the_card_says_what_was_trained(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "sample": {"every": 1, "steps": 1, "size": [64, 64]}}, seed=7, lora={"rank": 2},
                     result={"trigger": "a red heart", "license": "cc0-1.0", "dtype": "float16", "author": "A. B."})
    setup = replace(setup, origin=Origin(started="2026-11-22T19:30:00Z", recipe="ab" * 32))
    go(setup, tmp_path / "run")
    text = text_of(tmp_path / "run")
    for told in (setup.manifest.digest, *setup.model.base.values(), *setup.manifest.document["models"].values(),
                 "ab" * 32,
                 "| Seed | 7 |", "LoRA of rank 2, alpha 2, float16", "**a red heart**", "seed = 7\n", "lora.rank = 2\n",
                 "(samples/step-000002.png)", "2026-11-22T19:30:00Z", "| Author | A\\. B\\. |", "ComfyUI/models/loras"):
        assert told in text, told
    assert str(tmp_path) not in text and str(setup.model.path.parent) not in text
    front = dict(line.split(": ", 1) for line in text.split("---\n")[1].splitlines())
    assert json.loads(front["license"]) == "cc0-1.0" and json.loads(front["instance_prompt"]) == "a red heart"
    assert "base_model" not in front and "lora" in json.loads(front["tags"])
    (tmp_path / "run" / "README.md").unlink()
    go(setup, tmp_path / "run", resume=True)
    assert text_of(tmp_path / "run") == text


def test_the_card_says_which_changes_were_accepted(make, setup_of, tmp_path):
    """Those of every resume, escaped, and the encoders that --allow-other-encoders accepted."""
    made = make()
    given = {**QUICK, "lora": {"rank": 2}}
    go(setup_of(made, **given), tmp_path / "run")
    assert "--adopt" not in text_of(tmp_path / "run")
    changed = setup_of(made, **{**given, "steps": 3, "caption_dropout": 0.5, "lora": {"rank": 2, "alpha": 1.0}})
    go(changed, tmp_path / "run", resume=True, adopt=True)
    told = "caption_dropout is 0.5, was 0.0; lora.alpha is 1.0, was 2.0; lora.conv_alpha is 1.0, was 2.0"
    assert re.findall(r"\| Changed after step (\d+), with --adopt \| (.*) \|\n", text_of(tmp_path / "run")) == [
        ("2", escaped(told))]
    later = ({"step": 2, "changes": [NASTY]}, {"step": 5, "changes": ["a", "b"]})
    text = card(replace(changed, adopted=later, model=replace(changed.model, others={"vae": "ab" * 32})), 9,
                "lora.safetensors", None)
    assert f"| Changed after step 2, with --adopt | {escaped(NASTY)} |" in text
    assert "| Changed after step 5, with --adopt | a; b |" in text
    assert f"| Fingerprint of vae, as the base model has it | `{'ab' * 32}` |" in text


def test_the_card_says_who_reads_a_lokr(make, setup_of):
    text = card(setup_of(make(), **QUICK, lora={"rank": 2, "kind": "lokr"}), 2, "lora.safetensors", None)
    assert "LoKr of rank 2" in text and "diffusers reads no LoKr" in text and "load_lora_weights" not in text


def test_the_card_says_who_reads_a_dora(make, setup_of):
    """By default ComfyUI does, with diffusers' names diffusers."""
    for layout, told, other in (("auto", "diffusers reads no DoRA with these names", "load_lora_weights"),
                                ("diffusers", "load_lora_weights", "diffusers reads no DoRA")):
        setup = setup_of(make(), **QUICK, lora={"rank": 2, "dora": True, "format": layout})
        text = card(setup, 2, "lora.safetensors", None)
        assert told in text and other not in text and "DoRA of rank 2" in text
        lengths = "ComfyUI does not read attention layers and DoRA's lengths with diffusers' names."
        assert (lengths in text) == (layout == "diffusers") != ("ComfyUI/models/loras" in text)
    other = card(replace(setup, family=FAMILIES["zimage"]), 2, "lora.safetensors", None)
    assert "ComfyUI does not read DoRA's lengths with diffusers' names." in other


@pytest.mark.parametrize(("lora", "told"), [
    ({"alpha": 1.0}, ": there, a strength of 0.5 (alpha / rank) draws what was trained."),
    ({"layers": [{"match": "to_q", "alpha": 1.0}]}, ", but alpha / rank is 0.5 to 1 by layer: no strength there draws "
     "what was trained."),
    ({}, None), ({"alpha": 1.0, "format": "kohya"}, None)], ids=str)
def test_the_card_says_how_comfyui_draws_what_was_trained(make, setup_of, lora, told):
    setup = setup_of(make(), **QUICK, lora={"rank": 2, "format": "diffusers", **lora})
    setup = replace(setup, family=FAMILIES["zimage"])
    said = "ComfyUI reads no alpha in this file and takes it for the rank"
    text = card(setup, 2, "lora.safetensors", None)
    assert (f"\n{said}{told}\n" in text) if told else said not in text
    assert ("--set lora.format=kohya" in text) == (lora != {"alpha": 1.0, "format": "kohya"} and "layers" not in lora)
    assert said not in card(replace(setup, family=FAMILIES["lumina2"]), 2, "lora.safetensors", None), "unread anyway"


@pytest.mark.parametrize(("method", "rescaled"), [("lora", False), ("full", False), ("lora", True)])
def test_the_code_of_the_card_loads_the_result(make, setup_of, tmp_path, monkeypatch, method, rescaled):
    made = make(**({"prediction": "v_prediction"} if rescaled else {}))
    setup = setup_of(made, **QUICK, method=method, lora={"rank": 2}, optimizer={"lr": 0.05}, zero_terminal_snr=rescaled)
    go(setup, tmp_path / "run")
    code = re.search(r"```python\n(.*?)```", text_of(tmp_path / "run"), re.DOTALL).group(1)
    assert json.dumps(setup.model.path.name) in code
    code = code.replace(json.dumps(setup.model.path.name), repr(str(setup.model.path)))
    code = code.replace("pipeline(", "pipeline(**options, ")
    without = re.sub(r"^pipeline.load_lora_weights.*|, unet=unet", "", code, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path / "run")
    pictures = []
    for text in (code.replace("options, ", "options, prompt="), without.replace("options, ", "options, prompt=")):
        found = {"options": {"num_inference_steps": 1, "width": 64, "height": 64, "output_type": "np",
                             "generator": torch.Generator().manual_seed(0)}}
        exec(compile(text, "card", "exec"), found)
        pictures.append(found["picture"])
        schedule = found["pipeline"].scheduler
        assert (float(schedule.alphas_cumprod[-1]) == 0 and schedule.timesteps.tolist() == [999]) == rescaled
    assert np.abs(pictures[0] - pictures[1]).max() > 1e-4


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_modular_pipeline_loads_its_components_when_told_to(make, setup_of, monkeypatch, method):
    """And takes a prompt by name."""
    monkeypatch.setattr("train.card.is_modular", lambda model: True)
    text = card(setup_of(make(), **QUICK, method=method), 2, "lora.safetensors" if method == "lora" else "unet", None)
    lines = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    last = ['pipeline.load_components()', 'pipeline.load_lora_weights(".", weight_name="lora.safetensors")']
    if method == "full":
        last = ["pipeline.update_components(unet=unet)", last[0]]
    assert lines[-4].endswith('.from_pretrained("tiny")') and lines[-4].startswith("pipeline = ")
    assert lines[-3:] == [*last, 'picture = pipeline(prompt="a picture").images[0]']
    assert all(hasattr(diffusers.ModularPipeline, name) for name in ("load_components", "update_components"))


def test_text_of_others_is_text(make, setup_of):
    setup = setup_of(make(), **QUICK, result={"title": NASTY, "description": NASTY, "trigger": NASTY, "author": NASTY})
    text = card(setup, 2, "lora.safetensors", None)
    front, body = text.split("---\n", 2)[1:]
    assert json.loads(dict(line.split(": ", 1) for line in front.splitlines())["instance_prompt"]) == NASTY
    markdown = re.sub(r"```.*?\n```", "", body, flags=re.DOTALL)
    assert "<script>" not in markdown and "**a**" not in markdown and "[b](c)" not in markdown
    assert f"# {escaped(NASTY)}\n" in markdown and escaped("a-b") == "a\\-b"
    row = next(line for line in markdown.splitlines() if line.startswith("| Author"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_card_prints_a_loader_only_where_the_pipeline_has_one(make, setup_of, family, monkeypatch):
    monkeypatch.setattr("train.card.labels_of", lambda setup: Labels(architecture="another"))
    setup = setup_of(make(), **QUICK, lora={"format": "diffusers"})
    text = card(replace(setup, family=FAMILIES[family]), 2, "lora.safetensors", None)
    pipelines = [getattr(diffusers, name) for name in FAMILIES[family].pipelines if hasattr(diffusers, name)]
    assert pipelines and {hasattr(one, "load_lora_weights") for one in pipelines} == {"load_lora_weights" in text}


def test_families_by_what_loads_them(make, setup_of, monkeypatch):
    setup = setup_of(make(), **QUICK)
    pixart = replace(setup, family=FAMILIES["pixart_sigma"])
    assert "train merge lora.safetensors" in card(pixart, 2, "lora.safetensors", None)
    text = card(replace(setup, family=FAMILIES["zimage"]), 2, "lora.safetensors", None)
    assert "--set lora.format=kohya" in text and "models/loras" not in text
    hub = replace(setup, request=replace(setup.request, model="owner/name"))
    assert 'base_model: "owner/name"' in card(hub, 2, "lora.safetensors", None)
