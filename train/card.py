"""RUN/README.md: what was trained, on what, from which data, and how to load it. The same for the same run.

Titles, names and captions are the user's or come with files of others: in Markdown they are escaped, elsewhere quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prep.models.configs import is_modular, pipeline_index
from prep.models.named import is_local
from prep.training.schema import Config
from prep.training.table import SETTINGS, spell
from train.config.load import by_name, published
from train.metadata import labels_of, title_of
from train.models.adapters.readers import KINDS, unread_by_comfyui, unread_by_diffusers
from train.models.naming import Naming, naming_of
from train.setup import Setup

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~&:@])")


def card(setup: Setup, step: int, result: str, picture: str | None) -> str:
    """The text of the card. `result`: the file or directory; `picture`: the last sample grid, if there is one."""
    settings = setup.config.result
    parts = [_front(setup), f"# {escaped(title_of(setup))}"]
    if settings.description:
        parts.append(escaped(settings.description))
    if picture is not None:
        parts.append(f"![Sample pictures after {step} steps]({picture})")
    if settings.trigger:
        parts.append(f"Words of a prompt that show what was learned: **{escaped(settings.trigger)}**")
    parts += [table(dict(_facts(setup, step))), "## Use", *_use(setup, result), *changed_settings(setup.config),
              "*Written by train run at its end, and again whenever the run is continued.*"]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """`text` as plain text in Markdown: nothing in it is formatting, a link or HTML."""
    return _SPECIAL.sub(r"\\\1", text)


def front_matter(facts: Mapping[str, Any]) -> str:
    """What the Hub reads at the top of a card. JSON is YAML, too."""
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items())
    return "\n".join(["---", *lines, "---"])


def table(facts: Mapping[str, str]) -> str:
    """A table of titles and values, which are Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def code(*lines: str) -> str:
    """Lines of Python."""
    return "\n".join(["```python", *lines, "```"])


def changed_settings(config: Config) -> Iterator[str]:
    """The settings that differ from their defaults, as a section with lines of `--set`."""
    yield "## Settings"
    yield "Those that differ from their defaults:"
    lines = [f"{name} = {spell(value)}" for name, value in by_name(published(config)).items()
             if value != SETTINGS[name].default]
    yield "\n".join(["```toml", *lines, "```"])


def _front(setup: Setup) -> str:
    """The front matter by which the Hub sorts models."""
    settings, lora = setup.config.result, setup.config.method == "lora"
    facts: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image",
                             "tags": ["text-to-image", "diffusers", *(["lora"] if lora else [])]}
    if (model := _named(setup))[1]:
        facts["base_model"] = model[0]
    if settings.license:
        facts["license"] = settings.license
    if settings.trigger:
        facts["instance_prompt"] = settings.trigger
    return front_matter(facts)


def _named(setup: Setup) -> tuple[str, bool]:
    """The name of the base model, and whether it is a Hub's: a directory's path is left out."""
    named = setup.request.model or setup.manifest.model
    local = not isinstance(named, str) or is_local(named)
    return (setup.model.path.name if local else str(named)), not local


def _facts(setup: Setup, step: int) -> Iterator[tuple[str, str]]:
    """Title and value of each line of the table."""
    config, settings, plan = setup.config, setup.config.result, setup.plan
    yield "Base model", f"{escaped(_named(setup)[0])} ({escaped(labels_of(setup).architecture)})"
    for part, digest in sorted({**setup.model.base, **setup.manifest.document["models"]}.items()):
        yield f"Fingerprint of {part}", f"`{digest}`"
    for part, digest in sorted(setup.model.others.items()):  # accepted, though another one made the cache
        yield f"Fingerprint of {part}, as the base model has it", f"`{digest}`"
    if config.method == "lora":
        kind = "DoRA" if config.lora.dora else "PiSSA" if config.lora.init == "pissa" else KINDS[config.lora.kind]
        yield "Trained", f"{kind} of rank {config.lora.rank}, alpha {config.lora.alpha:g}, {settings.dtype}"
    else:
        part = "some weights" if config.full.train or config.full.freeze else "every weight"
        yield "Trained", f"{part} of the denoiser, {settings.dtype}"
    if setup.index.paired:
        yield "Slider", "of pairs of pictures: weight 1 makes what the first are like, -1 what the others are like"
    yield "Steps", f"{step} with up to {plan.batch_size} samples, in {plan.steps_per_epoch} an epoch"
    yield "Seed", str(config.seed)
    yield "Samples", str(sum(len(members) for members in setup.index.training))
    width, height = setup.index.usual_size
    yield "Most frequent size", f"{width} x {height}"
    yield "Manifest", f"`{setup.manifest.digest}`"
    if setup.origin.recipe:
        yield "Recipe", f"`{setup.origin.recipe}`"
    if setup.origin.started:
        yield "Begun", setup.origin.started
    if setup.init:
        yield "Weights at the beginning", f"{escaped(setup.init['name'])}, `{setup.init['sha256']}`"
    for each in setup.adopted:
        yield f"Changed after step {each['step']}, with --adopt", escaped("; ".join(each["changes"]))
    if settings.author:
        yield "Author", escaped(settings.author)


def _use(setup: Setup, result: str) -> Iterator[str]:
    """How diffusers and ComfyUI load the result."""
    index, modular, model = pipeline_index(setup.model.path), is_modular(setup.model.path), json.dumps(_named(setup)[0])
    pipeline, component = str(index["_class_name"]), setup.family.denoiser
    imported, schedule = (pipeline, []) if not setup.config.zero_terminal_snr else (f"DDIMScheduler, {pipeline}", [
        'pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="trailing",',
        '                                               prediction_type="v_prediction", rescale_betas_zero_snr=True)'])
    prompt = json.dumps(setup.config.result.trigger or "a picture", ensure_ascii=False)
    if setup.config.method == "full":
        kind, given = index[component][1], f"{component}={component}"
        yield code(f"from diffusers import {kind}, {imported}", "",
                   f'{component} = {kind}.from_pretrained("{result}")',
                   *([f"pipeline = {pipeline}.from_pretrained({model})", f"pipeline.update_components({given})"]
                     if modular else [f"pipeline = {pipeline}.from_pretrained({model}, {given})"]),
                   *called(prompt, *schedule, modular=modular))
        return
    naming = naming_of(setup.family).earlier_format() if setup.model.naming.earlier else naming_of(setup.family)
    if not setup.family.lora.in_diffusers:
        yield f"diffusers has no loader for a LoRA of this pipeline: `train merge {result} --model MODEL -o DIR`."
    elif unread := unread_by_diffusers(setup.config.lora, naming):
        yield f"diffusers reads no {unread}: `train merge {result} --model MODEL -o DIR`."
    else:
        loaded = f'pipeline.load_lora_weights(".", weight_name="{result}")'
        yield code(f"from diffusers import {imported}", "", f"pipeline = {pipeline}.from_pretrained({model})",
                   *called(prompt, loaded, *schedule, modular=modular))
    yield from _in_comfyui(setup, naming, result)


def called(prompt: str, *lines: str, modular: bool) -> list[str]:
    """The lines that load the components of a modular pipeline, then `lines`, then that which makes a picture."""
    return [*(["pipeline.load_components()"] if modular else []), *lines,
            f"picture = pipeline({'prompt=' if modular else ''}{prompt}).images[0]"]


def _in_comfyui(setup: Setup, naming: Naming, result: str) -> Iterator[str]:
    """How ComfyUI loads the result, and what it does not read."""
    lora = setup.config.lora
    if naming.format_of(lora) == "kohya":
        yield f"ComfyUI: copy `{result}` to `ComfyUI/models/loras`, and choose it in the node *Load LoRA*."
        if lora.dora:
            yield ("ComfyUI divides DoRA's lengths by those of the model's own rows instead of the sum's, so its "
                   "pictures differ a little.")
        return
    if unread := unread_by_comfyui(lora, naming):
        yield f"ComfyUI does not read {unread}."
    if setup.model.fits_kohya:
        yield 'ComfyUI: continue the run with `--set lora.format=kohya`, which writes the names that it reads.'
    if naming.is_misread(lora, setup.model.strengths):
        yield _strength(setup)


def _strength(setup: Setup) -> str:
    """What makes up for an alpha that ComfyUI does not read."""
    least, most = setup.model.strengths[0], setup.model.strengths[-1]
    warning = "ComfyUI reads no alpha in this file and takes it for the rank"
    if least != most:
        return (f"{warning}, but alpha / rank is {least:g} to {most:g} by layer: no strength there draws what was "
                "trained.")
    return f"{warning}: there, a strength of {least:g} (alpha / rank) draws what was trained."
