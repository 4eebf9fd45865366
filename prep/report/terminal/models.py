"""Formats the output of `prep models`: the facts of model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.report.terminal.tables import page, records, table

if TYPE_CHECKING:
    from prep.models.family import Family

RECIPES = "manifests/recipes"
HEADS = ("family", "latent", "step", "predicts", "text", "tokens", "LoRA", "pipeline", "models")
NARROW = ("family", "latent", "step", "predicts", "tokens", "models")  # those that fit a terminal
LEGEND = ("latent: channels x pixels per cell; tokens: of a text row, by default\n"
          "prep models FAMILY shows one in detail")


def describe(family: Family) -> dict[str, Any]:
    """A family as `prep models --json` has it."""
    text = family.text
    return {
        "name": family.name,
        "models": list(family.models),
        "pipelines": list(family.pipelines),
        "denoiser": family.denoiser,
        **({} if family.conditioner is None else {"conditioner": family.conditioner.component}),
        "latent": {"channels": family.latent_channels, "pixels_per_cell": family.factor},
        "step": family.step,
        "smallest_step": family.factor * family.patch,
        "resolution": family.resolution,
        "predictions": list(family.predictions),
        "text": {
            "arrays": {name: list(dims) for name, dims in text.arrays.items()},
            "layout": text.layout,
            "max_length": {"default": text.max_length, "least": text.shortest, "most": text.longest},
            "clip_skip": text.clip,
            "text_windows": text.windows,
            "text_quantization": family.text_compute is not None,
        },
        **({} if family.references is None else {
            "references": {"most": family.references.most, "resolution": family.references.resolution}}),
        "lora_formats": list(family.lora.formats),
        "recipe": f"{RECIPES}/{family.name}.toml",
        "train": f"{RECIPES}/{family.name}.train.toml",
    }


def models_table(families: Sequence[Mapping[str, Any]], *, width: int | None = None) -> str:
    """A table of families, from their documents; a terminal (`width` columns) gets shorter words and a legend."""
    if width is None:
        return page(records(HEADS, [_row(family) for family in families]))
    rows = [dict(zip(HEADS, _row(family), strict=True)) for family in families]
    return page(table(NARROW, [[row[head].replace("_prediction", "") for head in NARROW] for row in rows]),
                *LEGEND.split("\n"), width=width)


def _row(family: Mapping[str, Any]) -> tuple[str, ...]:
    text, most = family["text"], family["text"]["max_length"]["default"]
    latent = family["latent"]
    return (family["name"], f"{latent['channels']}x{latent['pixels_per_cell']}", str(family["step"]),
            ", ".join(family["predictions"]), "+".join(text["arrays"]),
            str(most) if text["layout"] == "full" else f"1-{most}",
            *(", ".join(family[name]) for name in ("lora_formats", "pipelines", "models")))


def family_text(family: Mapping[str, Any]) -> str:
    """The facts of one family, from its document, with the options and files that name them."""
    text, tokens = family["text"], family["text"]["max_length"]
    arrays = ", ".join(f"{name} [{', '.join(dims)}]" for name, dims in text["arrays"].items())
    lengths = str(tokens["most"]) if tokens["least"] == tokens["most"] else f"{tokens['least']} to {tokens['most']}"
    rows = (
        ("models", ", ".join(family["models"])),
        ("pipeline", ", ".join(family["pipelines"])),
        ("trained part", family["denoiser"]),
        *([("frozen part", f"{family['conditioner']}, makes its text of rows")] if "conditioner" in family else []),
        ("latent", f"{family['latent']['channels']} channels, {family['latent']['pixels_per_cell']} x "
                   f"{family['latent']['pixels_per_cell']} pixels per cell"),
        ("step", f"{family['step']} pixels; --step takes any multiple of {family['smallest_step']}"),
        ("resolution", f"{family['resolution']} pixels"),
        ("predicts", ", ".join(family["predictions"])),
        ("text", f"{arrays}; rows are {text['layout']}"),
        ("tokens", f"{tokens['default']}; --max-length takes {lengths}"),
        ("--clip-skip", "yes" if text["clip_skip"] else "no"),
        ("--text-windows", "yes" if text["text_windows"] else "no"),
        ("--text-quantization", "yes" if text["text_quantization"] else "no"),
        *_references(family.get("references")),
        ("LoRA files", ", ".join(family["lora_formats"])),
        ("recipe", family["recipe"]),
        ("training", family["train"]),
    )
    return page(table(("", ""), ((label, value) for label, value in rows)))


def _references(found: Mapping[str, int] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    count = "1 picture" if found["most"] == 1 else f"up to {found['most']} pictures"
    return [("references", f"{count} beside a caption, of about {found['resolution']}² pixels")]
