"""`manifests/dataset.toml`: a recipe with every setting, from what the code says of each."""

from __future__ import annotations

from pathlib import Path

from prep.captions.options import CaptionOptions
from prep.recipe.schema import SETTINGS, ModelOptions, Recipe, Source
from prep.recipe.write import Comment, render_recipe

PAGE = "manifests/dataset.toml"
HEAD = """\
A recipe: everything that decides the value of a row. prep encode dataset.toml --cache cache -o photos.json
Every setting is here with its default, or with an example if it has none. Paths are relative to this file."""
EXAMPLES = {name: row.value for name, row in SETTINGS.items() if row.spec.example is not None}


def recipe() -> str:
    """The text of the page."""
    source = Source(path=Path("photos"), table=EXAMPLES["source.table"], mask=EXAMPLES["source.mask"],
                    missing_mask=SETTINGS["source.missing_mask"].spec.example,
                    references=SETTINGS["source.references"].spec.example,
                    missing_reference=SETTINGS["source.missing_reference"].spec.example,
                    caption=CaptionOptions(prefix="a photo of "))
    whole = Recipe(
        sources=(source,), cache=EXAMPLES["cache.path"], prompts=EXAMPLES["prompts.file"],
        references=EXAMPLES["references.from"], embed=SETTINGS["embed.model"].spec.example,
        model=ModelOptions(**{name: SETTINGS[f"model.{name}"].spec.example for name in ("path", "family", "compute")}))
    shown = {name.replace("source.", "source[0].") for name in SETTINGS}
    return render_recipe(whole, base=Path(), remarks=[Comment(at="", text=HEAD)], shown=shown)
