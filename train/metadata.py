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

from prep.geometry import Size
from prep.models.pipeline import weighted_files
from train.config.load import as_table
from train.models import lora
from train.optim.schedule import warmup_steps
from train.runs.safetensors.writer import data_digest
from train.setup import Setup

MOST_TAGGED = 200_000  # samples whose captions are counted; more take too long
MOST_TAGS = 1000  # the most frequent ones

# Family → the architecture as sd-scripts (library/sai_model_spec.py) and SwarmUI (T2IModelClassSorter.cs) spell it.
_ARCHITECTURES: Mapping[str, str] = {
    "sd15": "stable-diffusion-v1", "sdxl": "stable-diffusion-xl-v1-base", "sd3": "stable-diffusion-3",
    "chroma": "chroma", "qwenimage": "qwen-image", "flux2": "flux.2-dev", "flux2_klein": "flux.2-klein",
    "zimage": "z-image", "lumina2": "lumina-2", "auraflow": "auraflow-v1", "hidream": "hidream-i1",
    "pixart_alpha": "pixart-alpha", "pixart_sigma": "pixart-ms-sigma-xl-2", "sana": "sana", "cogview4": "cogview4",
    "krea2": "krea-2", "ernie": "ernie-image", "ovis": "ovis-image",
}  # fmt: skip
# Family → the value of ss_base_model_version by which web UIs tell LoRA files apart.
_VERSIONS: Mapping[str, str] = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0", "sd3": "sd3", "flux": "flux1",
                                "flux2": "flux2", "flux2_klein": "flux2", "chroma": "chroma", "qwenimage": "qwen_image",
                                "zimage": "zimage", "lumina2": "lumina2"}


def checkpoint_metadata(setup: Setup, step: int, names: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of a weights file: data, model, settings, and the changes that --adopt accepted."""
    facts = {"latentry.manifest": setup.manifest.digest, "latentry.data": setup.identity.digest,
             "latentry.step": str(step), "latentry.config": json.dumps(as_table(setup.config), sort_keys=True),
             "latentry.models": json.dumps(setup.manifest.document["models"], sort_keys=True),
             "latentry.base": json.dumps(dict(setup.base), sort_keys=True)}
    if setup.others:
        facts["latentry.other_encoders"] = json.dumps(dict(setup.others), sort_keys=True)
    if setup.init:
        facts["latentry.init"] = json.dumps(dict(setup.init), sort_keys=True)
    if setup.adopted:
        facts["latentry.adopted"] = json.dumps([dict(each) for each in setup.adopted], sort_keys=True)
    if setup.config.method == "lora":
        facts.update(lora.describe(names, setup.config.lora, setup.naming, anchored=setup.ambiguous))
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
        found = json.loads(metadata.get(key, "{}"))
        return found if isinstance(found, dict) else {}
    return {}


def title_of(setup: Setup) -> str:
    """The result's title: `result.title`, else the manifest's name."""
    return setup.config.result.title or setup.manifest.path.stem


def architecture_of(setup: Setup) -> str:
    """The name of the base model's architecture."""
    name = setup.family.name
    if name == "sd21":
        return "stable-diffusion-v2-768-v" if setup.prediction == "v_prediction" else "stable-diffusion-v2-512"
    if name == "flux":
        guided = weighted_files(setup.model, setup.family.denoiser).config.get("guidance_embeds")
        return "flux-1-dev" if guided else "flux-1-schnell"
    return _ARCHITECTURES.get(name, name)


def usual_size(setup: Setup) -> Size:
    """The bucket with the most training samples; the first in a tie."""
    counts = [len(members) for members in setup.index.training]
    return setup.manifest.buckets[counts.index(max(counts))]


def _modelspec(setup: Setup) -> dict[str, str]:
    settings = setup.config.result
    width, height = usual_size(setup)
    adapter = "/lora" if setup.config.method == "lora" else ""
    facts = {"sai_model_spec": "1.0.1", "architecture": architecture_of(setup) + adapter, "implementation": "diffusers",
             "title": title_of(setup), "resolution": f"{width}x{height}", "date": setup.origin.started,
             "author": settings.author, "description": settings.description, "license": settings.license,
             "trigger_phrase": settings.trigger,
             "prediction_type": {"epsilon": "epsilon", "v_prediction": "v"}.get(setup.prediction, "")}
    return {f"modelspec.{key}": value for key, value in facts.items() if value}


def _as_sd_scripts(setup: Setup, step: int) -> dict[str, str]:
    """The facts of a LoRA file under the names of sd-scripts."""
    config, plan = setup.config, setup.plan
    facts: dict[str, Any] = {
        "output_name": title_of(setup), "base_model_version": _version(setup), "sd_model_name": setup.model.name,
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
    if setup.family.name in ("sd15", "sd21", "sdxl"):
        facts["v2"] = setup.family.name == "sd21"
    noise = config.noise
    objective = {"min_snr_gamma": config.loss.min_snr, "noise_offset": noise.offset,
                 "multires_noise_discount": noise.pyramid,
                 "multires_noise_iterations": noise.pyramid_levels if noise.pyramid else 0,
                 "ip_noise_gamma": noise.perturbation, "zero_terminal_snr": config.zero_terminal_snr}
    facts |= {name: value for name, value in objective.items() if value}
    if setup.origin.started:
        begun = time.strptime(setup.origin.started, "%Y-%m-%dT%H:%M:%SZ")
        facts["training_started_at"] = float(calendar.timegm(begun))
    if tags := _tags(setup) if config.result.tags else {}:
        facts["tag_frequency"] = json.dumps({setup.manifest.path.stem: tags}, ensure_ascii=False)
    return {f"ss_{key}": str(value) for key, value in facts.items()}


def _version(setup: Setup) -> str:
    if setup.family.name == "sd21":
        return "sd_v2_v" if setup.prediction == "v_prediction" else "sd_v2"
    return _VERSIONS.get(setup.family.name, setup.family.name)


def _buckets(setup: Setup) -> dict[str, Any]:
    return {str(number): {"resolution": list(size), "count": len(members)}
            for number, (size, members) in enumerate(zip(setup.manifest.buckets, setup.index.training, strict=True))}


def _tags(setup: Setup) -> dict[str, int]:
    """How many training samples have each part of a caption between commas, the most frequent first."""
    members = [sample for bucket in setup.index.training for sample in bucket.tolist()]
    if len(members) > MOST_TAGGED:
        return {}
    counts: Counter[str] = Counter()
    for sample in members:
        parts = {part.strip() for caption in setup.index.samples.captions(sample) for part in caption.split(",")}
        counts.update(parts - {""})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_TAGS])
