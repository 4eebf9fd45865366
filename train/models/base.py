"""Fingerprints of a run's base model: weights and config of the denoiser and of a conditioner, and the noise schedule's
config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from prep.digest import digest_json
from prep.fs.memo import Memo, memo_path
from prep.models.family import Family
from prep.models.files import Model
from prep.models.fingerprint import FileDigest, RememberedDigest, digest_file, digest_public, digest_weighted
from prep.models.pipeline import scheduler_config, weighted_files


def base_fingerprints(model: Model, family: Family, file_digest: FileDigest = digest_file) -> dict[str, str]:
    """Fingerprints of `denoiser`, `scheduler`, and `conditioner` if there is one, in the pipeline directory `model`.
    Raises `ModelError`."""
    parts = {kind: digest_weighted(weighted_files(model, name), file_digest)
             for kind, name in zip(("denoiser", "conditioner"), family.trained_with, strict=False)}
    return {**{kind: digest_json({"kind": kind, "parts": part}) for kind, part in parts.items()},
            "scheduler": digest_json({"kind": "scheduler", "config": digest_public(scheduler_config(model))})}


@contextmanager
def remembered_digests() -> Iterator[FileDigest]:
    """Yields a `digest_file` that skips unchanged files: it keeps digests in the user's cache directory."""
    with closing(Memo(memo_path("models", "1"))) as memo:
        yield RememberedDigest(memo, "sha256", "sha256")


def describe_base(base: Mapping[str, str]) -> str:
    """The fingerprints in short, for messages."""
    return ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(base.items()))
