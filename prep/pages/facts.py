"""Facts about a manifest, for the pages about it."""

from __future__ import annotations

from prep.manifest.describe import import_line
from prep.manifest.opened import OpenedManifest


def manifest_facts(opened: OpenedManifest) -> list[tuple[str, str]]:
    """Titles and values: the model, where latents were imported from, pairs, sample prompts, and digests in whole."""
    document = opened.manifest.document
    model, imported = document["model"].get("path") or document["model"].get("hub"), import_line(document["latents"])
    return [("model", f"{model} ({document['family']}, {document['prediction']})"),
            *([("latents", imported)] if imported else []),
            *([("references", "the other pictures of pairs, for a slider")] if opened.manifest.paired else []),
            ("sample prompts", f"{len(document['prompts']['samples']):,}"), ("manifest", opened.manifest.digest),
            *((f"{name} fingerprint", digest) for name, digest in document["models"].items())]
