"""What is no fault, but worth knowing before a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress

from prep.errors import ConfigError
from prep.formatting import counted, format_bytes
from prep.loader.index import Index
from prep.manifest.commands import encode_command
from prep.manifest.document import Manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.pipeline import weighted_files
from prep.training.optimizers import OPTIMIZERS
from prep.training.schema import Config, Lora, Preserve
from train.check.data import uses_masks
from train.check.objective import prediction_of
from train.config.unused import Facts, unused
from train.models.adapters.readers import unread_by_comfyui, unread_by_diffusers
from train.setup import CheckedModel, Initial


def notes_of(model: CheckedModel | None, config: Config, manifest: Manifest, index: Index | None) -> Iterator[str]:
    """What is no fault, but worth knowing: unused tensors, settings without effect, a learning rate far from the usual
    one, latents of another program."""
    if model is not None and index is not None:
        facts = Facts(masked=uses_masks(index, config), prior=bool(manifest.document["samples"]["prior"]),
                      referring=index.referring or index.paired, held_out=any(map(len, index.validation)),
                      large=model.large, convolves=model.convolves, rescaled=model.rescaled)
        yield from unused(config, facts)
        yield from _preserving(config.preserve, facts)
        if config.slider.on:
            yield ("slider is on: pictures teach nothing but where it is trained; each micro-batch takes three forward "
                   "passes of the base beside two of the adapters, at weight 1 and -1")
        if index.paired:
            pairs = counted(sum(map(len, index.training)), "pair")
            yield (f"a slider is trained from {pairs} of pictures: adapters learn the pictures at weight 1 and the "
                   "others at -1, in two forward passes of each micro-batch")
    if model is not None and model.adapter is not None:
        yield from model.adapter.notes
    if model is not None and model.drawing != model.path:
        yield _drawing(model, FAMILIES[manifest.family])
    initial = None if model is None else model.initial
    if initial is not None:
        yield from initial.notes
    if initial is not None and model is not None:
        yield from _other_origin(initial, model.base, prediction_of(config, manifest))
    if model is not None and config.method == "lora":
        with suppress(ConfigError):  # of a format that the family has not, which is a fault already
            yield from _unread(config.lora, model)
        yield from _misread(config.lora, model)
    optimizer = config.optimizer
    usual = OPTIMIZERS[optimizer.name].lr
    if optimizer.lr < usual / 200 or optimizer.lr > usual * 200:
        yield f"optimizer.lr is {optimizer.lr:g}; '{optimizer.name}' is usually given {usual:g}"
    imported = manifest.document["latents"].get("imported")
    if imported is not None and not imported["verified"]:
        yield (f"latents were imported ({imported['from']}), VAE unverified: none was compared with what the model's "
               f"VAE makes; to compare some: {encode_command(manifest, '--verify', '8')}")


def _preserving(preserve: Preserve, facts: Facts) -> Iterator[str]:
    """What the base's own predictions cost."""
    cost = "the base model predicts beside the trained one, a forward pass more in each micro-batch"
    if preserve.unmasked and facts.masked:
        yield f"preserve.unmasked is on: {cost}"
    elif preserve.prior and facts.prior:
        yield f'preserve.prior is on: {cost} with samples of role "prior"'
    if preserve.prompted:
        yield ("preserve.prompted is on: both models predict each micro-batch for another prompt, too; steps take "
               "about twice as long")


def _drawing(model: CheckedModel, family: Family) -> str:
    """Which other model draws sample pictures, and what that takes."""
    tensors = weighted_files(model.drawing, family.denoiser).tensors.values()
    stored = format_bytes(sum(tensor.end - tensor.begin for tensor in tensors))
    return (f"sample pictures are drawn by {model.drawing}: while they are made, its denoiser is in memory beside the "
            f"one that is trained, {stored} as its files have it")


def _unread(lora: Lora, model: CheckedModel) -> Iterator[str]:
    """What diffusers and ComfyUI do not read of the result."""
    if unread := unread_by_diffusers(lora, model.naming):
        other = "--set lora.format=diffusers writes names that it reads, and " if lora.kind == "lora" else ""
        yield f"diffusers reads no {unread}: {other}train merge makes a model that it loads"
    if unread := unread_by_comfyui(lora, model.naming):
        yield (f"ComfyUI does not read {unread}"
               + (": --set lora.format=kohya writes names that it reads" if model.fits_kohya else ""))


def _misread(lora: Lora, model: CheckedModel) -> Iterator[str]:
    """That ComfyUI scales the result otherwise than it was trained, and what helps."""
    if not model.naming.is_misread(lora, model.strengths):
        return
    least, most = model.strengths[0], model.strengths[-1]
    strength = f"{least:g}" if least == most else f"{least:g} to {most:g} by layer"
    yield (f"ComfyUI reads no alpha in files with diffusers' names and takes it for the rank, but alpha / rank is "
           f"{strength}{', by lora.rslora' if lora.rslora else ''}: "
           + (f"strength {least:g} there draws what was trained; " if least == most else "")
           + "what helps is alpha as large as the rank" + (" without lora.rslora" if lora.rslora else "")
           + (", or --set lora.format=kohya" if model.fits_kohya else ""))


def _other_origin(initial: Initial, base: Mapping[str, str], prediction: str) -> Iterator[str]:
    """In what the weights that a run begins with were trained for another model, as far as their file says."""
    said = {"epsilon": "epsilon", "v": "v_prediction"}.get(initial.metadata.get("modelspec.prediction_type", ""))
    if said not in (None, prediction):
        yield f"{initial.name} was trained to predict {said}, and this run trains it to predict {prediction}"
    if initial.metadata.get("latentry.base", dumped := json.dumps(dict(base), sort_keys=True)) != dumped:
        yield f"{initial.name} was trained on another model than the one that this run trains"
