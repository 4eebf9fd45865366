"""The metadata of weights files: what they were trained from, and what web UIs show and sort by.

Keys `latentry.*` are ours. `modelspec.*` is Stability AI's specification 1.0.1 (github.com/Stability-AI/ModelSpec), and
`ss_*` are the names of kohya's sd-scripts; both only as far as they are true of the run. No value depends on the clock:
the date is the run's beginning, which run.json keeps.
"""

from __future__ import annotations

import calendar
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from prep.loader.index import Index
from prep.models.configs import Configs
from prep.models.family import Labels
from train.config.load import as_table, published
from train.models import lora
from train.optim.schedule import warmup_steps
from train.runs.safetensors.writer import data_digest
from train.setup import Setup

MOST_TAGGED = 200_000  # samples whose captions are counted; more take too long
MOST_TAGS = 1000  # the most frequent ones


def checkpoint_metadata(setup: Setup, step: int, names: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of a weights file: data, model, settings, and the changes that --adopt accepted."""
    facts = {"latentry.manifest": setup.manifest.digest, "latentry.data": setup.identity.digest,
             "latentry.step": str(step),
             "latentry.config": json.dumps(as_table(published(setup.config)), sort_keys=True),
             "latentry.models": json.dumps(setup.manifest.document["models"], sort_keys=True),
             "latentry.base": json.dumps(dict(setup.model.base), sort_keys=True)}
    if setup.index.paired:
        facts["latentry.slider"] = "pairs"
    if setup.model.others:
        facts["latentry.other_encoders"] = json.dumps(dict(setup.model.others), sort_keys=True)
    if setup.init:
        facts["latentry.init"] = json.dumps(dict(setup.init), sort_keys=True)
    if setup.adopted:
        facts["latentry.adopted"] = json.dumps([dict(each) for each in setup.adopted], sort_keys=True)
    if setup.config.method == "lora":
        facts.update(lora.describe(names, setup.config.lora, setup.model.naming, anchored=setup.model.ambiguous))
    return facts


def result_metadata(setup: Setup, step: int, names: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Metadata of the run's result; `tensors` are those of its file."""
    facts = {**checkpoint_metadata(setup, step, names), **_modelspec(setup), "latentry.seed": str(setup.config.seed)}
    if setup.origin.recipe:
        facts["latentry.recipe"] = setup.origin.recipe
    if setup.config.method == "lora":
        digest = data_digest(tensors)
        facts |= {**_as_sd_scripts(setup, step), "modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}
    return facts


def table_in(metadata: Mapping[str, str], key: str) -> Mapping[str, Any]:
    """What a run wrote as JSON into the metadata of a file; empty if another program wrote the file."""
    with suppress(ValueError, RecursionError):
        table = json.loads(metadata.get(key, "{}"))
        return table if isinstance(table, dict) else {}
    return {}


def title_of(setup: Setup) -> str:
    """The result's title: `result.title`, else the manifest's name."""
    return setup.config.result.title or setup.manifest.path.stem


def labels_of(setup: Setup) -> Labels:
    """What the run's base model is called in metadata. Raises `ModelError`."""
    return setup.family.labels_of(setup.prediction, Configs(setup.model.path))


def _modelspec(setup: Setup) -> dict[str, str]:
    settings = setup.config.result
    width, height = setup.index.usual_size
    architecture = labels_of(setup).architecture + ("/lora" if setup.config.method == "lora" else "")
    facts = {"sai_model_spec": "1.0.1", "architecture": architecture, "implementation": "diffusers",
             "title": title_of(setup), "resolution": f"{width}x{height}", "date": setup.origin.started,
             "author": settings.author, "description": settings.description, "license": settings.license,
             "trigger_phrase": settings.trigger,
             "prediction_type": {"epsilon": "epsilon", "v_prediction": "v"}.get(setup.prediction, "")}
    return {f"modelspec.{key}": value for key, value in facts.items() if value}


def _as_sd_scripts(setup: Setup, step: int) -> dict[str, str]:
    """The facts of a LoRA file under the names of sd-scripts."""
    config, plan, labels = setup.config, setup.plan, labels_of(setup)
    facts: dict[str, Any] = {
        "output_name": title_of(setup), "base_model_version": labels.version or setup.family.name,
        "sd_model_name": setup.model.path.name,
        "learning_rate": config.optimizer.lr, "unet_lr": config.optimizer.lr, "optimizer": config.optimizer.name,
        "lr_scheduler": config.schedule.name, "lr_warmup_steps": warmup_steps(config.schedule, setup.steps),
        "max_grad_norm": config.optimizer.clip, "seed": config.seed, "steps": step, "max_train_steps": setup.steps,
        "num_batches_per_epoch": plan.steps_per_epoch, "epoch": step // plan.steps_per_epoch,
        "total_batch_size": plan.batch_size, "batch_size_per_device": plan.micro_batch,
        "gradient_accumulation_steps": plan.batch_size // plan.micro_batch,
        "network_dropout": config.lora.dropout, "caption_dropout_rate": config.caption_dropout,
        "num_train_images": sum(len(members) for members in setup.index.training),
        "enable_bucket": True, "bucket_info": json.dumps({"buckets": _buckets(setup)}),
    }
    if labels.v2 is not None:
        facts["v2"] = labels.v2
    noise = config.noise
    objective = {"min_snr_gamma": config.loss.min_snr, "noise_offset": noise.offset,
                 "multires_noise_discount": noise.pyramid,
                 "multires_noise_iterations": noise.pyramid_levels if noise.pyramid else 0,
                 "ip_noise_gamma": noise.perturbation, "zero_terminal_snr": config.zero_terminal_snr}
    facts |= {name: value for name, value in objective.items() if value}
    if setup.origin.started:
        begun = time.strptime(setup.origin.started, "%Y-%m-%dT%H:%M:%SZ")
        facts["training_started_at"] = float(calendar.timegm(begun))
    if tags := _tags(setup.index) if config.result.tags else {}:
        facts["tag_frequency"] = json.dumps({setup.manifest.path.stem: tags}, ensure_ascii=False)
    return {f"ss_{key}": str(value) for key, value in facts.items()}


def _buckets(setup: Setup) -> dict[str, Any]:
    return {str(number): {"resolution": list(size), "count": len(members)}
            for number, (size, members) in enumerate(zip(setup.manifest.buckets, setup.index.training, strict=True))}


def _tags(index: Index) -> dict[str, int]:
    """How many training samples have each part of a caption between commas, the most frequent first."""
    members = [sample for bucket in index.training for sample in bucket.tolist()]
    if len(members) > MOST_TAGGED:
        return {}
    counts: Counter[str] = Counter()
    for sample in members:
        parts = {part.strip() for caption in index.samples.captions(sample) for part in caption.split(",")}
        counts.update(parts - {""})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_TAGS])
