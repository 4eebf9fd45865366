"""The settings of a recipe, as frozen records with their defaults. `prep.recipe.load` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from prep.batching.split import Role
from prep.captions.options import CaptionOptions
from prep.findings import ScanOptions
from prep.sources.item import MaskFrom

MASK_RESIZE = ("allow", "reject")
MASKS = ("auto", "none", "sidecar", "alpha")  # where masks come from; a directory's path is also allowed
BUCKETS = ("step", "ratio", "sdxl-40", "list", "single")
UPSCALES = ("never", "allow", "reject")
STORED_DTYPES = ("bfloat16", "float16", "float32")
POSTERIORS = ("mean", "mean+std")
QUANTIZATIONS = ("none", "8bit", "4bit")  # of text encoders; what each means: prep/models/text/quantization.py


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model whose encoders make the rows, and the dtypes."""

    path: str = ""  # a diffusers directory, or a Hub id; "" if none is needed (bucket, masks)
    family: str = ""  # "": inferred from the pipeline's class
    dtype: str = "bfloat16"  # of the stored rows
    compute: str = ""  # of the encoders; "": the same as dtype
    max_length: int = 0  # tokens of a caption, with start and end; 0: the model family's
    clip_skip: int = 0  # last layers of CLIP that are skipped, beyond those that the family skips anyway
    text_windows: int = 1  # of 75 tokens each that CLIP reads one after the other
    text_quantization: str = "none"  # of T5 and language models, by bitsandbytes
    posterior: str = "mean"  # what is stored of the VAE's posterior; with mean+std training draws from it
    tile: int = 0  # pixels; pictures with a longer side are encoded in overlapping tiles of this side; 0: never


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """How pictures are resized and cropped into buckets."""

    resolution: int | tuple[int, ...] = 512  # pixels; the target area is its square; several: one sample at each
    buckets: str = "step"
    sizes: tuple[str, ...] = ()  # with `buckets = "list"`: "1024x1024" and so on, width first
    step: int = 0  # pixels between bucket sides; 0: the model family's 8 × patch, or 64 without a model
    shortest: int = 0  # bucket side in pixels; 0: resolution / 4, or 256 if that is at most resolution / 2
    longest: int = 0  # bucket side in pixels; 0: resolution · 2
    min_side: int = 0  # of a picture, in pixels; pictures with a shorter side are skipped; 0: step
    upscale: str | float = "never"  # small pictures: never, allow, reject, or the largest factor; true: allow
    crop: str = "centre"  # or "center"; where to crop: see `prep.buckets.views`
    views: int = 1  # crops per picture, with `crop = "random"`; training shows one of them at a time
    flip: str = "none"  # mirroring: none, both (each crop, unmirrored and mirrored), always
    alpha: str = "white"  # color that transparency is flattened onto, or "reject"
    min_bucket: int = 1  # buckets with fewer pictures merge into their nearest neighbor

    def __post_init__(self) -> None:
        if isinstance(self.upscale, bool):
            object.__setattr__(self, "upscale", "allow" if self.upscale else "never")
        if self.crop == "center":  # keys and documents use the British spelling
            object.__setattr__(self, "crop", "centre")

    @property
    def resolutions(self) -> tuple[int, ...]:
        """All resolutions, ascending."""
        return (self.resolution,) if isinstance(self.resolution, int) else self.resolution


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of pictures, and their role."""

    path: Path
    enabled: bool = True  # whether it is used where no --sources names it
    repeats: int = 1  # how often an epoch shows each of its samples
    role: Role = "train"
    weight: float = 1.0  # loss weight of its samples
    include: tuple[str, ...] = ()  # globs of names below the source; none: all
    exclude: tuple[str, ...] = ()  # globs of names below the source
    table: Path | None = None  # of captions: kohya's JSON, JSON lines, CSV, Parquet
    mask: MaskFrom | None = None  # None: the recipe's
    caption: CaptionOptions | None = None  # None: the recipe's


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete recipe, with defaults for everything the file leaves out."""

    sources: tuple[Source, ...]  # those that are used
    unused: tuple[Path, ...] = ()  # the places of the others in the file
    model: ModelOptions = field(default_factory=ModelOptions)
    image: ImageOptions = field(default_factory=ImageOptions)
    caption: CaptionOptions = field(default_factory=CaptionOptions)
    mask: MaskFrom = "auto"  # or a directory of masks
    mask_resize: str = "allow"  # allow: scale masks of another size than their picture; another shape is never used
    edits: Path | None = None  # directory of edited captions and masks, which replace those beside the pictures
    scan: ScanOptions = field(default_factory=ScanOptions)
    validation: float = 0.0  # fraction of the pictures
    prompts: Path | None = None
    cache: Path | None = None  # where the rows go without --cache; None: to cache, beside the file
    file: Path | None = None  # the file it was read from
    options: tuple[str | Path, ...] = ()  # command options that change values of the file or defaults
    notes: tuple[str, ...] = ()  # what was decided without being asked, for the user

    def mask_of(self, source: int) -> MaskFrom:
        """Where the masks of a source come from."""
        own = self.sources[source].mask
        return self.mask if own is None else own

    def settle_masks(self, found: bool) -> Recipe:
        """The recipe with "auto" replaced by "sidecar" if masks were `found`, else by "none"."""
        kind: MaskFrom = "sidecar" if found else "none"
        return replace(self, mask=kind if self.mask == "auto" else self.mask,
                       sources=tuple(replace(one, mask=kind) if one.mask == "auto" else one for one in self.sources))

    @property
    def mask_origin(self) -> Literal["none", "alpha", "file"]:
        """Where mask rows come from: the pictures' transparency, or mask files ("auto" counts as files)."""
        kinds = {self.mask_of(number) for number in range(len(self.sources))}
        return "alpha" if "alpha" in kinds else "none" if kinds == {"none"} else "file"

    @property
    def mask_folders(self) -> tuple[Path, ...]:
        """The mask directories, each once."""
        masks = (self.mask_of(number) for number in range(len(self.sources)))
        return tuple(dict.fromkeys(mask for mask in masks if isinstance(mask, Path)))

    def caption_of(self, source: int) -> CaptionOptions:
        """The caption options of a source."""
        return self.sources[source].caption or self.caption
