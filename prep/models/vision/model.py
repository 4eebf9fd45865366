"""A vision model whose embeddings of pictures are stored: DINOv2, SigLIP, CLIP; its files, and how it sees a picture or
reads a text.

A picture is prepared as the library's own processors do by Pillow: scaled, its center cut out, normalized. It is done
here, since which of two ways the library takes depends on whether torchvision is installed, and they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prep.arrays import DType
from prep.digest import digest_json
from prep.errors import ModelError
from prep.geometry import Size
from prep.models.files import ComponentFiles, parse_config
from prep.models.fingerprint import Expected, FileDigest, digest_public, digest_tokenizer, digest_weighted
from prep.models.hub import SINGLE, locate_directory
from prep.models.pipeline import single_model_files, single_tokenizer_files
from prep.parse import Unparsed, brief, count, expect, list_of, within

PREPROCESSOR = "preprocessor_config.json"
COMPUTE: DType = "float32"
STORED: DType = "float16"  # rows have length 1, and half precision has three digits of each number
MOST_SIDE = 2048  # pixels of a picture as a model sees it; SigLIP's largest has 512
MOST_WIDTH = 1 << 16  # numbers of a row
MOST_TOKENS = 1 << 10  # of a text; SigLIP's largest reads 64, LongCLIP 248
EXAMPLES = "for example facebook/dinov2-base, google/siglip-base-patch16-224 or openai/clip-vit-large-patch14"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A type of models that embed pictures."""

    model: str  # the class of transformers
    output: str  # what of it is the embedding, as it is called in keys
    width: tuple[str, int]  # the end of a tensor's name, and which of its sides is as long as a row
    tokenizer: str = ""  # the class of a tokenizer whose config names none; "": it reads no texts
    padding: str = ""  # of texts: to the longest of a batch, or to as many tokens as the model reads


# As Hugging Face's model cards use them for retrieval: the CLS token of DINOv2 after the last layer norm
# (`pooler_output`), and what CLIP and SigLIP compare with texts (`get_image_features`). By model_type.
WITH_TEXTS = "features"  # the `output` of models whose pictures can be compared with texts
_CLS = Kind(model="Dinov2Model", output="cls", width=("layernorm.weight", 0))
KINDS: Mapping[str, Kind] = {
    "dinov2": _CLS,
    "dinov2_with_registers": Kind(model="Dinov2WithRegistersModel", output="cls", width=("layernorm.weight", 0)),
    "clip": Kind(model="CLIPModel", output=WITH_TEXTS, width=("visual_projection.weight", 0),
                 tokenizer="CLIPTokenizer", padding="longest"),
    # Its embedding is the state of the last token of all that it reads, so texts are padded to these, as in training
    # (transformers, docs of SigLIP). SigLIP 2's models of one size have this type, too.
    "siglip": Kind(model="SiglipModel", output=WITH_TEXTS, width=("vision_model.post_layernorm.weight", 0),
                   tokenizer="SiglipTokenizer", padding="max_length"),
}
# The class that reads a tokenizer, by the one that its config names, without "Fast": SigLIP 2's files name Gemma's, but
# it was trained with lowercase texts (transformers, Siglip2Tokenizer). Others are read as their tokenizer.json says.
_TOKENIZERS = {"CLIPTokenizer": "CLIPTokenizer", "SiglipTokenizer": "SiglipTokenizer",
               "GemmaTokenizer": "Siglip2Tokenizer", "Siglip2Tokenizer": "Siglip2Tokenizer"}
# Files of which these read one; others read tokenizer.json.
_READ = {"CLIPTokenizer": ("tokenizer.json", "vocab.json"), "SiglipTokenizer": ("spiece.model",)}
_POSITIONS = "text_model.embeddings.position_embedding.weight"  # a row for each token that the model reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """How a picture is made into what a model sees."""

    scaled: int | Size  # its shorter side, or width and height
    crop: Size | None  # the part in the middle that is seen; None: all
    resample: int  # as Pillow numbers its filters
    factor: float  # that each number from 0 to 255 is multiplied with
    mean: tuple[float, ...]  # of each channel, afterwards
    std: tuple[float, ...]

    @property
    def seen(self) -> Size:
        """Width and height of what the model sees."""
        assert self.crop is not None or not isinstance(self.scaled, int), "pictures of all shapes become one size"
        return self.crop or self.scaled  # type: ignore[return-value]  # said above

    def scaled_size(self, size: Size) -> Size:
        """The size that a picture of `size` is scaled to; of the longer side rounded down, as the library does."""
        if not isinstance(self.scaled, int):
            return self.scaled
        width, height = size
        longer = int(self.scaled * max(size) / min(size))
        return (self.scaled, longer) if width <= height else (longer, self.scaled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a model reads texts, to be compared with pictures."""

    tokenizer: str  # the class of transformers
    tokens: int  # of a text that it reads; what is beyond is cut off
    digest: str  # of the tokenizer's files


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionModel:
    """A vision model, known by its files. It can be sent to other processes."""

    folder: Path
    kind: Kind
    preparation: Preparation
    width: int  # numbers of a row
    expected: Expected  # its fingerprint
    reading: Reading | None  # None: it reads no texts


def vision_files(named: str, *, download: bool) -> ComponentFiles:
    """The files of a directory, or of a Hub id: weights only as safetensors. Raises `ModelError`."""
    return single_model_files(locate_directory(named, download=download, parts=SINGLE))


def vision_model(files: ComponentFiles, file_digest: FileDigest) -> VisionModel:
    """The model with these files, which are read for its fingerprint. Raises `ModelError`."""
    kind = kind_of(files)
    return VisionModel(folder=files.folder, kind=kind, preparation=preparation_of(files), width=_width(files, kind),
                       reading=reading_of(files, kind),
                       expected=Expected(digest=vision_fingerprint(files, file_digest), file_digest=file_digest))


def vision_fingerprint(files: ComponentFiles, file_digest: FileDigest) -> str:
    """The fingerprint of a vision model: its weights, its config, and that of its preprocessor. Raises `ModelError`."""
    return digest_json({"kind": "vision", "parts": digest_weighted(files, file_digest),
                        "preprocessor": digest_public(_preprocessor(files))})


def kind_of(files: ComponentFiles) -> Kind:
    """The type of a model. Raises `ModelError` if it embeds no pictures."""
    found = files.config.get("model_type")
    if not isinstance(found, str) or found not in KINDS:
        raise ModelError(f"the model in {files.folder} has type {brief(found)}, expected one that embeds pictures: "
                         f"{', '.join(KINDS)}", hint=EXAMPLES)
    return KINDS[found]


def reading_of(files: ComponentFiles, kind: Kind) -> Reading | None:
    """How a model reads texts; `None` for one without the weights or the tokenizer for it. Raises `ModelError`."""
    tokenizer = single_tokenizer_files(files) if kind.tokenizer else None
    tokens = [tensor.shape[0] for name, tensor in files.tensors.items() if f".{name}".endswith(f".{_POSITIONS}")]
    if tokenizer is None or len(tokens) != 1 or not 2 <= tokens[0] <= MOST_TOKENS:
        return None
    named = str(tokenizer.config.get("tokenizer_class") or kind.tokenizer).removesuffix("Fast")
    reader = _TOKENIZERS.get(named, "PreTrainedTokenizerFast")
    if not any(name in tokenizer.small for name in _READ.get(reader, ("tokenizer.json",))):
        return None
    return Reading(tokenizer=reader, tokens=tokens[0],
                   digest=digest_json({"kind": "tokenizer", "files": digest_tokenizer(tokenizer)}))


def _width(files: ComponentFiles, kind: Kind) -> int:
    """The numbers of a row, from the shape of a tensor: configs leave out what is as usual. Raises `ModelError`."""
    end, side = kind.width
    shapes = [tensor.shape for name, tensor in files.tensors.items() if f".{name}".endswith(f".{end}")]
    if len(shapes) != 1 or len(shapes[0]) <= side or not 0 < shapes[0][side] <= MOST_WIDTH:
        raise ModelError(f"the weights in {files.folder} have {len(shapes)} tensors called {end}, expected one, which "
                         "says how many numbers an embedding has", hint="download the model again")
    return shapes[0][side]


def _preprocessor(files: ComponentFiles) -> dict[str, Any]:
    if PREPROCESSOR not in files.small:
        raise ModelError(f"{files.folder} has no {PREPROCESSOR}, which says how the model sees a picture",
                         hint="download the model again, with all of its files")
    return parse_config(files.small[PREPROCESSOR], files.folder / PREPROCESSOR)


def preparation_of(files: ComponentFiles) -> Preparation:
    """How the model's preprocessor prepares a picture. Raises `ModelError`."""
    config, where = _preprocessor(files), files.folder / PREPROCESSOR
    try:
        return _parsed(config)
    except Unparsed as error:
        raise ModelError(f"{where}: {error}", hint=f"name another model: {EXAMPLES}") from None


def _parsed(config: Mapping[str, Any]) -> Preparation:
    crops = bool(config.get("do_center_crop", "crop_size" in config))
    crop = _size(config.get("crop_size"), "crop_size") if crops else None
    crop = (crop, crop) if isinstance(crop, int) else crop
    scaled = _size(config.get("size"), "size", shortest=crops)
    if not config.get("do_resize", True) or (crop is None and isinstance(scaled, int)):
        raise Unparsed("pictures keep their size or shape, expected all to become one size")
    if crop is not None and min(crop[0], crop[1]) > (scaled if isinstance(scaled, int) else min(scaled)):
        raise Unparsed(f"crop_size is {list(crop)}, expected no more than size")
    if not config.get("do_normalize", True):
        raise Unparsed("do_normalize is false, expected pictures to be normalized")
    mean, std = (list_of(config.get(name), partial(_number, low=low, high=1e6), name)
                 for name, low in (("image_mean", -1e6), ("image_std", 1e-6)))
    if len(mean) != 3 or len(std) != 3:
        raise Unparsed(f"image_mean and image_std have {len(mean)} and {len(std)} numbers, expected 3, of red, green "
                       "and blue")
    return Preparation(
        scaled=scaled, crop=crop, resample=count(config.get("resample", 3), "resample", 5),  # Pillow's filters
        factor=_number(config.get("rescale_factor", 1 / 255), "rescale_factor", low=1e-6, high=1)
        if config.get("do_rescale", True) else 1.0,
        mean=tuple(mean), std=tuple(std))


def _number(value: Any, where: str, *, low: float, high: float) -> float:
    number = expect(value, float, where)
    within(number, low, high, where)
    return number


def _size(value: Any, what: str, *, shortest: bool = False) -> int | Size:
    """The length of the shorter side, or width and height; a mere number is the first if `shortest`."""
    if isinstance(value, int):
        side = _side(value, what)
        return side if shortest else (side, side)
    table = expect(value, dict, what)
    if "shortest_edge" in table and not table.get("longest_edge"):
        return _side(table["shortest_edge"], f"{what}.shortest_edge")
    return _side(table.get("width"), f"{what}.width"), _side(table.get("height"), f"{what}.height")


def _side(value: Any, what: str) -> int:
    within(side := count(value, what), 1, MOST_SIDE, what)
    return side
