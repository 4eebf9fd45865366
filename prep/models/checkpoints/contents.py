"""What a single file is, from its header alone: which parts of which family it has, and what its marks say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prep.errors import ModelError, UsageError
from prep.formatting import join_texts, shell_name
from prep.models.checkpoints import gguf
from prep.models.checkpoints.parts import DENOISER, Parts, is_harmless, parts_of
from prep.models.files import FETCH_AGAIN, Shape, StoredTensor, distilled, unreadable
from prep.models.weights import Scales, read_metadata, read_tensors, scales_in

CHECKPOINTS = (".safetensors", ".sft")
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
# Configs and tokenizers of published models, in the package: those of runwayml's Stable Diffusion 1.5, and of
# stabilityai's 2.1, 2.1-base and XL base 1.0; of 1.5, 2 and XL also for inpainting, whose UNets take 9 channels. Their
# tokenizers have no files of a vocabulary: all have CLIP's, which `pipeline.tokenizer_files` adds.
PUBLISHED = Path(__file__).parents[1] / "published"


def published(name: str) -> Path | None:
    """The package's configs of this name; `None` if it has none."""
    folder = PUBLISHED / name
    return folder if re.fullmatch(r"[a-z0-9_-]+", name) and (folder / "model_index.json").is_file() else None


def name_configs(file: Path | str) -> str:
    """What to do about a single file without configs: every command says the same."""
    return (f"name where its configs and tokenizers are, after an @: {shell_name(f'{file}@DIR')} (DIR: a diffusers "
            "directory or Hub id of the same architecture, which also has the parts that the file lacks)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a single file has."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    scales: Scales
    parts: Parts
    family: str  # of its denoiser; "": its names are of none that is known
    scheduler: Mapping[str, Any]  # what the file says of its scheduler's config
    predicts: str  # "epsilon" or "v_prediction"; "": it does not say

    @property
    def lacking(self) -> tuple[str, ...]:
        """Patterns of the components whose weights another model has to have."""
        parts = {"vae": self.parts.vae, "text_encoder*": self.parts.encoders,
                 **({"text_conditioner": self.parts.conditioner} if self.family in CONDITIONED else {})}
        return tuple(name for name, part in parts.items() if not part)

    def unread(self) -> list[str]:
        """The tensors that are of no component, sorted."""
        parts = (self.parts.denoiser, self.parts.conditioner, self.parts.vae, *self.parts.encoders.values())
        known = self.scales.beside.union(*(part.values() for part in parts))
        return sorted(name for name in self.tensors.keys() - known if not is_harmless(name))


def contents_of(path: Path) -> Contents:
    """What the file has. Raises `ModelError`, also for a pickle, a LoRA, and a truncated file."""
    _check_kind(path)
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return _contents(path, (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=8)  # a command asks for each component, some several times
def _contents(path: Path, stamp: tuple[int, ...]) -> Contents:
    tensors = read_tensors([path])
    if find_spec("gguf") is None and any(each.dtype in gguf.QUANTIZED for each in tensors.values()):
        raise UsageError(f"{path} has quantized tensors, which need the package gguf, which is not installed",
                         hint="pip install 'latentry[gguf]'")
    if not tensors:
        raise ModelError(f"{path} has no tensors", hint="name the file of a model")
    _refuse_adapter(path, tensors)
    scales = scales_in(tensors)
    parts = parts_of(tensors.keys() - scales.beside)
    shapes = {name: tensors[there].shape for name, there in parts.denoiser.items()}
    _refuse_other_inputs(path, shapes)
    predicts = _predicts(path, tensors)
    return Contents(path=path, tensors=tensors, scales=scales, parts=_with_scales(parts, tensors, scales),
                    family=_family(shapes), predicts=predicts, scheduler={
                        **({"prediction_type": predicts} if predicts == "v_prediction" else {}),
                        **({"rescale_betas_zero_snr": True} if "ztsnr" in tensors else {})})


def _with_scales(parts: Parts, tensors: Mapping[str, StoredTensor], scales: Scales) -> Parts:
    """The parts with the scales of their weights."""
    def whole(part: Mapping[str, str]) -> dict[str, str]:
        prefix = next((there[:-len(name)] if name else there for name, there in part.items()), "")
        return {**part, **{name.removeprefix(prefix): name for name in scales.beside if name.startswith(prefix)}}

    denoiser, conditioner, vae = (whole(part) if part else {}
                                  for part in (parts.denoiser, parts.conditioner, parts.vae))
    return Parts(denoiser={name: there for name, there in denoiser.items() if there not in conditioner.values()},
                 conditioner=conditioner, vae=vae,
                 encoders={prefix: whole(part) for prefix, part in parts.encoders.items()})


def _check_kind(path: Path) -> None:
    """Raises `ModelError` for a file that is not there, and for one that has the name of a pickle."""
    if not path.exists():
        raise ModelError(f"model {path} does not exist", hint="name a diffusers directory, a single file, or a Hub id")
    if path.suffix.lower() in PICKLES:
        raise ModelError(f"model {path} is a pickle, which can run code when it is loaded: only safetensors and GGUF "
                         "are read",
                         hint="look for NAME.safetensors of the same model; or convert it: torch.load(FILE, "
                         "weights_only=True), then safetensors.torch.save_file of its state_dict")


_ADAPTERS = re.compile(r"\.(lora_(A|B|down|up)\.|lora_(magnitude|alpha)|hada_w[12]_|lokr_w[12]|dora_scale$)"
                       r"|^lora_(unet|te)")


def _refuse_adapter(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if any(_ADAPTERS.search(name) for name in tensors):
        raise ModelError(f"{path} is a LoRA, expected a model", hint="name the model that it was trained on; a LoRA to "
                         "begin training with is for train run --init-from, one to be merged for train merge")


# ---- what the names and shapes of a denoiser say ---------------------------------------------------------------------

_Shapes = Mapping[str, Shape]


def _context(shapes: _Shapes) -> int:
    """The width of the text that a UNet reads; 0 if it is none."""
    return next((shape[1] for name, shape in sorted(shapes.items())
                 if name.endswith("attn2.to_k.weight") and len(shape) == 2), 0)


def _is_unet(shapes: _Shapes) -> bool:
    ours = {"conv_in.weight", "mid_block.resnets.0.conv1.weight"}
    return "input_blocks.0.0.weight" in shapes or ours <= shapes.keys()


def _has(*names: str) -> Callable[[_Shapes], bool]:
    """Whether tensors have these names, or names that begin so."""
    return lambda shapes: all(any(name.startswith(each) for name in shapes) for each in names)


# The first that is true. Both names of each: the authors', and diffusers'.
_FAMILIES: tuple[tuple[str, Callable[[_Shapes], bool]], ...] = (
    ("kolors", lambda shapes: _is_unet(shapes) and "encoder_hid_proj.weight" in shapes),
    ("sdxl", lambda shapes: _is_unet(shapes) and any(name.startswith(("label_emb.", "add_embedding."))
                                                    for name in shapes)),
    ("sd21", lambda shapes: _is_unet(shapes) and _context(shapes) == 1024),
    ("sd15", lambda shapes: _is_unet(shapes) and _context(shapes) == 768),
    ("flux3", _has("early_stream_modulations.")),
    ("chroma", _has("distilled_guidance_layer.")),
    ("flux2", _has("double_stream_modulation_img.")),
    ("flux", _has("double_blocks.0.img_attn.", "single_blocks.", "vector_in.")),
    ("flux", _has("single_transformer_blocks.", "time_text_embed.text_embedder.", "x_embedder.weight")),
    ("sd3", _has("joint_blocks.0.")),
    ("sd3", _has("transformer_blocks.0.attn.add_k_proj.", "pos_embed.proj.", "time_text_embed.")),
    ("zimage", _has("x_pad_token", "cap_pad_token")),
    ("lumina2", _has("noise_refiner.", "context_refiner.", "layers.")),
    ("qwenimage", _has("transformer_blocks.0.img_mod.", "transformer_blocks.0.txt_mod.", "txt_norm.")),
    ("qwenimage21", _has("txt_in.text_norm.")),
    ("auraflow", _has("register_tokens")),
    ("krea2", _has("txtfusion.")), ("krea2", _has("text_fusion.")),
    ("hidream", _has("double_stream_blocks.", "single_stream_blocks.")),
    ("anima", _has("blocks.0.adaln_modulation_self_attn.", "t_embedding_norm.")),
    ("anima", _has("transformer_blocks.0.norm1.linear_1.", "time_embed.t_embedder.")),
)


CONDITIONED = ("anima",)  # families with a model before the denoiser, of which a file may have both
# Families whose denoisers have the names of another's.
NAMED_AS: Mapping[str, str] = {"flux2_klein": "flux2", "flux_kontext": "flux", "qwenimage_edit": "qwenimage"}


def _family(shapes: _Shapes) -> str:
    name = next((name for name, is_one in _FAMILIES if shapes and is_one(shapes)), "")
    return _INPAINTING.get((name, _first(shapes)[1:2]), name)


_FIRST = ("input_blocks.0.0.weight", "conv_in.weight", "img_in.weight", "x_embedder.weight")
# Families that inpaint, by those whose names their tensors have, and what their first layers take.
_INPAINTING: Mapping[tuple[str, Shape], str] = {
    ("sd15", (9,)): "sd15_inpaint", ("sd21", (9,)): "sd21_inpaint", ("sdxl", (9,)): "sdxl_inpaint",
    ("flux", (384,)): "flux_fill"}


def _first(shapes: _Shapes) -> Shape:
    """The shape of the first layer of a UNet, or of FLUX's transformer; (): none is known."""
    return next((shapes[name] for name in _FIRST if name in shapes), ())


_ENDS = ("ref_time_in.", "target_timestep_embedder.")  # FLUX.3 klein's, by both names


def _refuse_other_inputs(path: Path, shapes: _Shapes) -> None:
    """Raises `ModelError` for a UNet that is given more than a noisy latent, or a masked picture beside it, for SDXL's
    refiner, and for a denoiser that is told where each step ends."""
    if any(name.startswith(_ENDS) for name in shapes):
        raise distilled(path)
    first = _first(shapes)
    if _is_unet(shapes) and len(first) == 4 and first[1] not in (4, 9):
        raise ModelError(f"{path} is a UNet that takes {first[1]} channels, expected 4, or 9 to inpaint: it makes "
                         "pictures from other pictures, and such models are not supported",
                         hint="name the model that makes pictures from text alone")
    if _is_unet(shapes) and _context(shapes) == 1280:
        raise ModelError(f"{path} is the refiner of SDXL, which is not supported", hint="name SDXL's base model")


def _predicts(path: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """What the file says that its denoiser predicts: by ComfyUI's mark, or in the metadata of sd-scripts' files."""
    if "v_pred" in tensors:
        return "v_prediction"
    return {"v": "v_prediction", "epsilon": "epsilon"}.get(read_metadata(path).get("modelspec.prediction_type", ""), "")


def own_configs(contents: Contents) -> Path:
    """The package's configs for the model. Raises `ModelError` if it has none."""
    if not contents.parts.denoiser:
        raise no_denoiser(contents)
    if contents.family == "sd21" and not contents.predicts:
        raise ModelError(f"{contents.path} is of family 'sd21', of which some models predict noise and some v, and the "
                         "file does not say which", hint=f"add @sd21-base if it predicts noise, as models for 512 "
                         f"pixels, or @sd21 if v: {shell_name(f'{contents.path}@sd21')}")
    name = "sd21-base" if contents.family == "sd21" and contents.predicts == "epsilon" else contents.family
    found = published(name)
    if found is not None:
        return found
    if contents.family:
        raise ModelError(f"{contents.path} is of family '{contents.family}', whose configs are not in this package",
                         hint=name_configs(contents.path))
    raise ModelError(f"{contents.path} has tensors of no family that is known by its names: "
                     f"{join_texts(sorted(contents.parts.denoiser), 3)}", hint=name_configs(contents.path))


def no_denoiser(contents: Contents) -> ModelError:
    """The error to raise for a file that has another part of a model only."""
    found = "a VAE" if contents.parts.vae else "text encoders"
    return ModelError(f"{contents.path} has {found} and no denoiser, expected a model",
                      hint=f"tensors of a denoiser are named {DENOISER[0]}…, or have no prefix; {FETCH_AGAIN}")


# ---- which of a file's text encoders is which component --------------------------------------------------------------

_EMBEDDING = re.compile(r"(?:.*\.)?(token_embedding|embed_tokens|shared)\.weight")
_WIDTHS = ("hidden_size", "d_model")
Config = tuple[str, Mapping[str, Any]]  # the name of a class, and config.json


def encoder_part(contents: Contents, name: str, configs: Mapping[str, Config]) -> Mapping[str, str]:
    """The tensors of the text encoder `name`; none if the file lacks it.

    `configs` has those of each text encoder of the pipeline, in their order. An encoder is told from others by the
    shape of its table of tokens.
    """
    taken: set[str] = set()
    for component, (kind, config) in configs.items():
        wanted = _table(config)
        for prefix, part in contents.parts.encoders.items():
            there = next((match[1] for each in part if (match := _EMBEDDING.fullmatch(each))), "")
            shapes = {contents.tensors[whole].shape for each, whole in part.items() if _EMBEDDING.fullmatch(each)}
            if prefix not in taken and wanted in shapes and (there == "token_embedding") == kind.startswith("CLIP"):
                taken.add(prefix)
                if component == name:
                    return part
                break
    return {}


def _table(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rows and columns of a text encoder's table of tokens."""
    inner = config.get("text_config")
    body = inner if isinstance(inner, dict) else config
    return body.get("vocab_size"), next((body[key] for key in _WIDTHS if key in body), None)
