"""What evaluating checkpoints needs, before any is evaluated: the manifest's embeddings, the vision model that made
them, and prompts."""

from __future__ import annotations

from pathlib import Path

from prep.errors import ConfigError, ModelError, Problem
from prep.loader.index import Index
from prep.manifest.document import Manifest
from prep.models.fingerprint import bytes_of, ticking
from prep.models.vision.model import EXAMPLES, VisionModel, vision_files, vision_model
from prep.progress import BackgroundTotal, Progress
from prep.training.schema import Config
from train.models.base import remembered_digests
from train.sampling.prompts import of_file, of_manifest
from train.setup import RunRequest

AGAIN = "prep encode SOURCE --embed MODEL, or set model in [embed] of the recipe, and run prep encode again"
_NONE = "or evaluate no checkpoint: --set evaluate.every=0"


def vision_to_evaluate(request: RunRequest, config: Config, manifest: Manifest, index: Index | None,
                       progress: Progress) -> VisionModel | None:
    """The vision model of a run that evaluates its checkpoints; `None`: it does not. Raises `ConfigError` for a
    manifest without embeddings, `ModelError`; `PathError`, `CacheError` for prompts whose pictures should stay."""
    wanted = config.evaluate
    if not wanted.every:
        return None
    try:
        if index is not None:
            of_manifest(index)
            if wanted.neutral:
                of_file(index, Path(wanted.neutral), "evaluate.neutral")
        return vision_of(manifest, wanted.embed or None, "--set evaluate.embed=MODEL", progress,
                         download=request.download)
    except Problem as error:
        error.hint = f"{error.hint}; {_NONE}" if error.hint else _NONE
        raise


def vision_of(manifest: Manifest, named: str | None, option: str, progress: Progress, *, download: bool) -> VisionModel:
    """The vision model that made the manifest's embeddings: the one that `option` has `named`, or else the one in the
    options that the manifest records. Raises `ConfigError` for a manifest without any, `ModelError`."""
    if not manifest.embedded:
        raise ConfigError(f"{manifest.path} has no embeddings of its pictures to compare with", hint=AGAIN)
    options = manifest.options
    if named is None and "--embed" in options[:-1]:
        named = str(options[options.index("--embed") + 1])
    if not named:
        raise ModelError(f"{manifest.path} does not say where the vision model is that made its embeddings",
                         hint=f"name it: {option}, {EXAMPLES}")
    files = vision_files(named, download=download)
    with remembered_digests() as digest, progress("hashing the model", BackgroundTotal(lambda: bytes_of([files])),
                                                  "bytes") as tick:
        model = vision_model(files, ticking(digest, tick))
    expected = str(manifest.fields["embedding"].context["model"])
    if model.expected.digest != expected:
        raise ModelError(f"the vision model in {model.folder} did not make the embeddings of {manifest.path}: its "
                         f"fingerprint is {model.expected.digest[:12]}, expected {expected[:12]}",
                         hint=f"name the model that did with {option.replace('MODEL', '').rstrip(' =')}, or make them "
                         "with this one: prep encode again")
    return model
