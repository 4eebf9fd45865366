"""The settings of dataset.toml, as frozen records: this is the only place that says what they are.

Reading, options of commands, comments in written recipes, the converters' bounds and `manifests/dataset.toml` come from
it. `prep.recipe.load` reads the records, `prep.recipe.validate` checks what depends on several settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from prep.batching.split import ROLES, Role
from prep.buckets.sizes import MOST_RESOLUTION, MOST_SIDE
from prep.buckets.views import FLIPS
from prep.captions.options import CaptionOptions
from prep.findings import ScanOptions
from prep.fs.place import Place
from prep.geometry import FITS
from prep.recipe.checks import (
    UPSCALES,
    alpha_check,
    crop_check,
    globs_check,
    mask_check,
    path_check,
    references_check,
    resolution_check,
    sizes_check,
    table_check,
    tile_check,
    upscale_check,
)
from prep.setting import Row, rows_of, setting
from prep.similarity.options import SimilarityOptions
from prep.sources.item import MaskFrom

MASKS = ("auto", "none", "sidecar", "alpha")  # where masks come from; a directory's path is also allowed
BUCKETS = ("step", "ratio", "sdxl-40", "list", "single")
MISSING_REFERENCE = ("reject", "none")
MISSING_MASK = ("none", "draw")
STORED_DTYPES = ("bfloat16", "float16", "float32")
MOST_WINDOWS = 3  # as in sd-scripts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model whose encoders make the rows, and the dtypes."""

    path: str = setting("", example="models/sd15", help="a diffusers directory, a single file (FILE, or FILE@DIR "
                        "with configs), or a Hub id")
    family: str = setting("", values="a name of prep models", example="sd15", help="the model family",
                          derived="inferred from the pipeline's class")
    dtype: str = setting("bfloat16", choices=STORED_DTYPES, help="dtype of the stored rows")
    compute: str = setting("", choices=STORED_DTYPES, example="bfloat16", help="dtype in which the encoders compute",
                           derived="that of the rows; text of families with T5 or a language model: bfloat16")
    max_length: int = setting(0, high=1 << 16, help="tokens of a caption, at most; the rest is cut off",
                              derived="the model family's")
    clip_skip: int = setting(0, high=64, help="skip this many of CLIP's last layers; 1 means the last but one")
    text_windows: int = setting(1, low=1, high=MOST_WINDOWS,
                                help="windows of 75 tokens that CLIP reads one after the other, 1 to 3 (SD 1.x, SDXL)")
    # What each means: prep/models/text/quantization.py.
    text_quantization: str = setting("none", choices=("none", "8bit", "4bit"),
                                     help="weights of T5 and language models in 8 or 4 bits, by bitsandbytes: less "
                                     "memory, other rows")
    posterior: str = setting("mean", choices=("mean", "mean+std"),
                             help="what is stored of the VAE's posterior: with mean+std, rows twice as large, training "
                             "draws new latents at each showing")
    tile: int = setting(0, check=tile_check, values="0, or a multiple of 128",
                        help="encode pictures with a side of more pixels than this in overlapping tiles, with less "
                        "memory; a multiple of 128")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """The options of resizing and cropping pictures into buckets."""

    resolution: int | tuple[int, ...] = setting(
        512, check=resolution_check, values=f"8 to {MOST_RESOLUTION}, or several",
        help="target side in pixels: bucket areas are about its square; with several, like 512,1024, one sample at "
        "each")
    buckets: str = setting("step", choices=BUCKETS, help="how bucket sizes are chosen")
    sizes: tuple[str, ...] = setting((), check=sizes_check, values="a list of sizes, width first",
                                     help="bucket sizes for buckets list, width first: 1024x1024,832x1216,…")
    step: int = setting(0, low=8, high=1024, help="pixels between bucket sides",
                        derived="8 x patch size of the model family; 64 without a model")
    shortest: int = setting(0, high=MOST_SIDE, help="bucket side in pixels",
                            derived="resolution / 4, or 256 if that is at most resolution / 2")
    longest: int = setting(0, high=MOST_SIDE, help="bucket side in pixels", derived="resolution * 2")
    min_side: int = setting(0, high=MOST_SIDE, help="in pixels: pictures with a shorter side are skipped",
                            derived="step")
    upscale: str | float = setting("never", check=upscale_check, choices=UPSCALES, other="NUMBER",
                                   help="small pictures: never enlarge, allow, reject, or enlarge at most NUMBER times")
    crop: str = setting("centre", check=crop_check, choices=("center", "random", "focus"),
                        help="where to crop; focus: around the mask's center of mass")
    views: int = setting(1, low=1, high=64, help="crops per picture, with crop random; training draws one each time")
    flip: str = setting("none", choices=FLIPS, help="mirroring; both: each crop, unmirrored and mirrored")
    alpha: str = setting("white", check=alpha_check, choices=("white", "black", "gray", "keep", "reject"),
                         other="#RRGGBB", help="color that replaces transparency; keep gives it to a VAE that "
                         "takes it; or reject")
    min_bucket: int = setting(1, low=1, high=1 << 30,
                              help="merge buckets with fewer pictures than this into their nearest neighbor")

    @property
    def resolutions(self) -> tuple[int, ...]:
        """All resolutions, ascending."""
        return (self.resolution,) if isinstance(self.resolution, int) else self.resolution


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of pictures, and their role."""

    path: Place
    enabled: bool = setting(True, help="whether it is used; --sources NAME uses it all the same")
    repeats: int = setting(1, low=1, high=10_000, help="how often an epoch shows each of its samples")
    role: Role = setting("train", choices=ROLES, help="what its samples are for; prior: regularization")
    weight: float = setting(1.0, high=1000, help="loss weight of its samples")
    include: tuple[str, ...] = setting((), check=globs_check, values="a list of globs",
                                       help="globs of names to use, as in a .gitignore", derived="all")
    exclude: tuple[str, ...] = setting((), check=globs_check, values="a list of globs",
                                       help="globs of names not to use")
    table: Place | None = setting(None, check=path_check, values="a path", example=Path("captions.jsonl"),
                                 help="captions by file name: JSON lines, kohya's JSON, CSV or Parquet; metadata.* is "
                                 "always read")
    mask: MaskFrom | None = setting(None, check=mask_check, values="as mask.from", example="none",
                                    help="its own masks", derived="mask.from")
    missing_mask: str = setting("", choices=MISSING_MASK, example="draw", derived="mask.missing",
                                help="what it does with pictures that lack a mask")
    references: tuple[Place, ...] | None = setting(None, check=references_check, values="a list of directories",
                                                   example=(), help="its own directories of references",
                                                   derived="references.from")
    missing_reference: str = setting("", choices=MISSING_REFERENCE, example="reject", derived="references.missing",
                                     help="what it does with pictures that lack a reference")
    caption: CaptionOptions | None = setting(None, check=table_check, values="a table",
                                             help="its own keys of [caption]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete recipe, with defaults for everything the file leaves out."""

    sources: tuple[Source, ...]  # those that are used
    unused: tuple[Place, ...] = ()  # the places of the others in the file
    model: ModelOptions = field(default_factory=ModelOptions)
    image: ImageOptions = field(default_factory=ImageOptions)
    caption: CaptionOptions = field(default_factory=CaptionOptions)
    mask: MaskFrom = setting("auto", name="mask.from", check=mask_check, choices=MASKS, other="DIR",
                             help="where masks are: beside the pictures as NAME-masklabel.png (auto: if any), in their "
                             "transparency, or in a directory")
    mask_resize: str = setting("allow", name="mask.resize", choices=("allow", "reject"),
                               help="scale masks of another size than their picture; another shape is never used")
    missing_mask: str = setting("none", name="mask.missing", choices=MISSING_MASK,
                                help="what models that inpaint do with pictures that lack a mask: leave them out; or "
                                "draw one by chance for each view (draw)")
    references: tuple[Place, ...] | None = setting(
        None, name="references.from", check=references_check, values="a list of directories",
        example=(Path("control"),),
        help="directories of reference pictures, which are conditions of the pictures with their names, in this order: "
        "edit training; []: none are used", derived="those that tables, tars and NAME.source files give")
    missing_reference: str = setting("reject", name="references.missing", choices=MISSING_REFERENCE,
                                     help="what to do with pictures that lack a reference; none: train them with those "
                                     "that they have, or without")
    reference_fit: str = setting("family", name="references.fit", choices=FITS,
                                 help="how reference pictures are scaled: as the family's pipeline does, each at its "
                                 "own size; to the bucket and crop of their picture; or not at all (exact: cut to "
                                 "whole steps). pair: each is no condition, but its picture's opposite in a slider, "
                                 "cropped alike")
    reference_resolution: int = setting(0, name="references.resolution", high=MOST_RESOLUTION,
                                        help="side of the square whose area larger reference pictures are scaled down "
                                        "to, with fit family", derived="the family's")
    embed: str = setting("", name="embed.model", example="models/dinov2-base", help="a vision model that makes an "
                         "embedding of each picture, to find near-duplicates and outliers: DINOv2, SigLIP or CLIP, a "
                         "directory or a Hub id", derived="none, and no embeddings")
    edits: Path | None = setting(None, name="edits.from", check=path_check, values="a directory",
                                 help="directory of edited captions and masks, which replace those beside the pictures",
                                 derived="that of prep view --edit, if it has any")
    similarity: SimilarityOptions = field(default_factory=SimilarityOptions)
    scan: ScanOptions = field(default_factory=ScanOptions)
    validation: float = setting(0.0, name="validation.fraction", high=0.9,
                                help="fraction of pictures held out for validation")
    prompts: Path | None = setting(None, name="prompts.file", check=path_check, values="a file",
                                   example=Path("prompts.txt"), help="file of sample prompts, one per line: prompt --n "
                                   "negative")
    cache: Place | None = setting(None, name="cache.path", check=path_check, values="a directory or URL",
                                 example=Path("cache"), help="where encoded rows go without --cache",
                                 derived="cache, beside the recipe")
    file: Path | None = None  # the file it was read from
    options: tuple[str | Place, ...] = ()  # command options that change values of the file or defaults
    notes: tuple[str, ...] = ()  # what was decided without being asked, for the user

    def mask_of(self, source: int) -> MaskFrom:
        """The origin of a source's masks."""
        own = self.sources[source].mask
        return self.mask if own is None else own

    def settle_masks(self, exist: bool) -> Recipe:
        """The recipe with "auto" replaced by "sidecar" if masks `exist`, else by "none"."""
        kind: MaskFrom = "sidecar" if exist else "none"
        sources = tuple(replace(source, mask=kind) if source.mask == "auto" else source for source in self.sources)
        return replace(self, mask=kind if self.mask == "auto" else self.mask, sources=sources)

    @property
    def mask_origin(self) -> Literal["none", "alpha", "file"]:
        """The origin of mask rows: the pictures' transparency, or mask files ("auto" counts as files, and so do masks
        that are drawn)."""
        kinds = {self.mask_of(number) for number in range(len(self.sources))}
        return "alpha" if "alpha" in kinds else "none" if kinds == {"none"} and not self.draws_masks else "file"

    def draws_mask(self, source: int) -> bool:
        """Whether masks are drawn for a source's pictures that have none."""
        return (self.sources[source].missing_mask or self.missing_mask) == "draw"

    @property
    def draws_masks(self) -> bool:
        """Whether masks are drawn for pictures of any source."""
        return any(self.draws_mask(number) for number in range(len(self.sources)))

    @property
    def mask_folders(self) -> tuple[Place, ...]:
        """The mask directories, each once."""
        masks = (self.mask_of(number) for number in range(len(self.sources)))
        return tuple(dict.fromkeys(mask for mask in masks if not isinstance(mask, str)))

    def references_of(self, source: int) -> tuple[Place, ...] | None:
        """The directories of a source's references, in their order; `None`: those that it has itself are used."""
        own = self.sources[source].references
        return self.references if own is None else own

    def missing_reference_of(self, source: int) -> str:
        """What becomes of a source's pictures that lack a reference."""
        return self.sources[source].missing_reference or self.missing_reference

    @property
    def reference_folders(self) -> tuple[Place, ...]:
        """The directories of references, each once."""
        return tuple(dict.fromkeys(folder for number in range(len(self.sources))
                                   for folder in self.references_of(number) or ()))

    def caption_of(self, source: int) -> CaptionOptions:
        """The caption options of a source."""
        return self.sources[source].caption or self.caption


SECTIONS: Mapping[str, type] = {"model": ModelOptions, "image": ImageOptions, "caption": CaptionOptions,
                                "similarity": SimilarityOptions, "scan": ScanOptions, "source": Source}
OWN: Mapping[str, Row] = {row.field: row for row in rows_of(Recipe)}  # by the field of `Recipe`
SETTINGS: Mapping[str, Row] = {row.name: row for rows in (
    *(rows_of(record, name) for name, record in SECTIONS.items()), OWN.values()) for row in rows}


def setting_of(key: str) -> Row:
    """The setting that commands and `choices` call `key`: `image.step`, or a field of `Recipe` like `mask`."""
    return OWN[key] if key in OWN else SETTINGS[key]
