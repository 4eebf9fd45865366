"""Bytes on disk for a sample with two references, beside the layouts of musubi-tuner and ai-toolkit.

    python tests/benchmarks/bench_references.py

Nothing is encoded: rows are counted as `prep encode` counts them, with a key and a checksum each, and the others' files
are written with zeros of the shapes and types that their code has (musubi-tuner 30c658c, src/musubi_tuner/dataset/
cache_io.py, and its cache_latents scripts; ai-toolkit 27a03a91, toolkit/dataloader_mixins.py):

musubi-tuner  a file for the latents of a sample, its own and those of all its references, in the VAE's type: float32 of
              FLUX.2 unless told otherwise, bfloat16 of Qwen-Image's published VAE; and one for the text row of its
              caption, bfloat16
ai-toolkit    a file for the latent of a sample, bfloat16, and one for its text row; references are encoded in each step

Only Latentry stores, of a family whose text encoder sees references, also the text row of no prompt beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from results import emit, parser_of, table
from safetensors.torch import save_file

from prep.models.families.registry import FAMILIES
from prep.models.fields import FieldSpecs

SIDE, REFERENCES = 1024, 2
OF_ROW = 32 + 4  # bytes of a row's key and checksum
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A family, and the shapes that its rows have for a picture of `SIDE` pixels."""

    name: str
    family: str
    latent: tuple[int, ...]
    latent_type: torch.dtype  # in musubi-tuner's cache
    text: tuple[int, int]  # tokens, channels
    texts: int = 1  # rows of text for a sample, in ours


CASES = (
    Case(name="FLUX.2 klein 4B", family="flux2_klein", latent=(128, 64, 64), latent_type=torch.float32,
         text=(512, 7680)),
    # Its caption, and about 200 tokens for each reference that the encoder sees.
    Case(name="Qwen-Image-Edit 2511", family="qwenimage_edit", latent=(16, 1, 128, 128), latent_type=torch.bfloat16,
         text=(460, 3584), texts=2),
)


def ours(case: Case, sharing: int) -> float:
    """Bytes of a sample's rows where each reference is that of `sharing` samples."""
    tokens, channels = case.text
    family = FAMILIES[case.family]
    specs = FieldSpecs(family=family, dtype="bfloat16", text={"hidden": (tokens, channels)}, with_std=False)
    latent = specs.row_bytes("latent", (SIDE, SIDE)) + OF_ROW
    text = specs.row_bytes("text", None, tokens if family.text.layout == "trimmed" else None) + OF_ROW
    return latent * (1 + REFERENCES / sharing) + case.texts * text


def written(root: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of a safetensors file with these tensors."""
    save_file(dict(tensors), root / "file.safetensors")
    return (root / "file.safetensors").stat().st_size


def musubi(case: Case, root: Path) -> int:
    names = ("latents", *(f"latents_control_{number}" for number in range(REFERENCES)))
    return (written(root, {name: torch.zeros(case.latent, dtype=case.latent_type) for name in names})
            + written(root, {"text": torch.zeros(case.text, dtype=torch.bfloat16)}))


def ai_toolkit(case: Case, root: Path) -> int:
    return (written(root, {"latent": torch.zeros(case.latent, dtype=torch.bfloat16)})
            + written(root, {"text": torch.zeros(case.text, dtype=torch.bfloat16)}))


def main() -> None:
    options = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        rows = [(case.name, *(f"{size / MIB:.2f}" for size in (
            ours(case, 1), ours(case, 4), musubi(case, root), ai_toolkit(case, root)))) for case in CASES]
    emit("Bytes on disk with two references",
         f"MiB a sample of {SIDE}x{SIDE} pixels with {REFERENCES} references of that size, by the layouts of the "
         "caches; nothing was encoded. ai-toolkit has no latents of references: it encodes them again in each step. Of "
         "Qwen-Image-Edit ours are the largest, since no prompt has a row beside each sample's references, too, which "
         "dropped captions and guidance need; the others keep none.\n\n"
         + table(("", "ours", "ours, references of 4 samples", "musubi-tuner", "ai-toolkit"), rows), options.write)


if __name__ == "__main__":
    main()
