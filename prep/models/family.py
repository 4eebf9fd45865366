"""The facts of a model family, as a record. `prep.models.families` has one module per family that fills it.

Nothing outside of those modules knows a family by name. B samples, C latent channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from prep.errors import UsageError
from prep.geometry import Placement, Size
from prep.models.configs import Configs
from prep.models.denoiser.samplers import Solvers
from prep.models.lora.kohya import Kohya, Rule

if TYPE_CHECKING:  # these facts are read without torch, by prep --help and train check
    from torch import Tensor

Class = tuple[str, str]  # library and class, as model_index.json names them
Dims = tuple[str, ...]
Shape = tuple[int, ...]
Prediction = Literal["epsilon", "v_prediction", "flow"]
TextRow = Mapping[str, "Tensor"]  # name of an array → the array of one caption, without padding if rows are trimmed
TextArrays = Mapping[str, "Tensor"]  # the arrays of several text rows, [B, …] each

ATTENTION_MASK = "attention_mask"  # the array of trimmed rows that says which tokens are text (1) and which padding (0)
# The array of trimmed rows that lack their pictures, which the denoiser is given as latents in these places: 1 for a
# token that a picture comes before, 0 for any other.
PICTURES = "pictures"
TOKEN = "token"  # the dimension whose length depends on the caption in trimmed rows
GROUP = 16  # trimmed rows are stored in groups of equal length, rounded up to a multiple of this


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """What a recipe may choose about text; all of it is in the keys of text rows."""

    max_length: int  # tokens; of one window, if there are several
    clip_skip: int = 0  # last layers of a CLIP encoder that are skipped
    windows: int = 1  # times that a CLIP encoder reads max_length tokens, its start and end tokens included
    quantization: str = "none"  # of the weights of T5 and language models: see prep/models/text/quantization.py

    @property
    def tokens(self) -> int:
        """Tokens of the longest row."""
        return self.max_length * self.windows


def options_of(context: Mapping[str, Any]) -> TextOptions:
    """The options that a cache's text rows were encoded with, from the context of their keys."""
    return TextOptions(max_length=int(context["max_length"]), clip_skip=int(context.get("clip_skip", 0)),
                       windows=int(context.get("text_windows", 1)),
                       quantization=str(context.get("quantization", "none")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """How a family's text encoder sees reference pictures beside the words."""

    # How it sees a picture of this size that the VAE is given so; None: it cannot.
    place: Callable[[Size, Placement], Placement | None]
    # Pipeline, caption (None: no prompt), pictures in order (uint8 [H, W, 3]), options, device.
    encode: Callable[[Any, str | None, Sequence[Any], TextOptions, Any], TextRow]
    tokens: int  # most that it makes of a picture


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoding:
    """What a family's text rows are, and how its pipeline makes them."""

    arrays: Mapping[str, Dims]  # dimensions of each stored array, in the order of its shape
    layout: Literal["full", "trimmed"]  # full: attention covers the padding, so it is part of the row
    max_length: int  # tokens, if the recipe does not say; template included if the pipeline counts it
    longest: int  # most tokens that a recipe may ask for
    shapes: Callable[[Configs, TextOptions], Mapping[str, Shape]]  # of the longest row; reads only configs
    encode: Callable[[Any, Sequence[str], TextOptions, Any], Sequence[TextRow]]  # pipeline, captions, options, device
    # How negative prompts are encoded, if the pipeline does it otherwise than captions.
    negative: Callable[[Any, Sequence[str], TextOptions, Any], Sequence[TextRow]] | None = None
    # The row that the pipeline uses without a prompt; None: that of the negative prompt "".
    without_prompt: Callable[[Any, TextOptions, Any], TextRow] | None = None
    pipeline_options: tuple[str, ...] = ()  # values of model_index.json that decide rows, so they are in the keys
    # What the pipeline reads of the denoiser's config to make rows; also in the keys.
    denoiser_config: Callable[[Configs], Mapping[str, int | str]] | None = None
    constants: Mapping[str, str | int] | None = None  # templates and the like of the pipeline's code, also in the keys
    clip: bool = False  # whether clip_skip means something
    windows: bool = False  # whether text_windows does
    shortest: int = 1  # fewest tokens that a recipe may ask for
    # Whether the pipeline pads captions to the length it is asked for, and its one text encoder masks the padding. A
    # row's tokens are then the same for every length that the caption fits into (to the bit on a CPU, where it was
    # tried), and the shortest is quickest.
    padding_masked: bool = False
    # The parts of a caption, in order, that the pipeline gives its tokenizer one by one, to keep `max_length` tokens of
    # them; None: it gives it the whole caption in its template.
    pieces: Callable[[str], Sequence[str]] | None = None
    vision: Vision | None = None  # None: rows depend on no pictures

    def encode_texts(self, pipeline: Any, texts: Sequence[str], options: TextOptions, device: Any, *,
                     negative: bool) -> Sequence[TextRow]:
        """The rows of captions, or of negative prompts."""
        encode = self.negative if negative and self.negative is not None else self.encode
        return encode(pipeline, texts, options, device)

    def unconditional(self, pipeline: Any, options: TextOptions, device: Any) -> TextRow:
        """The row that the pipeline uses without a prompt."""
        if self.without_prompt is not None:
            return self.without_prompt(pipeline, options, device)
        return self.encode_texts(pipeline, [""], options, device, negative=True)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a denoiser is given besides the noisy latent and the time."""

    text: TextArrays
    sizes_B6: Tensor  # original height and width, top and left of the crop, height and width of the bucket, in pixels
    schedule: Mapping[str, Any] = field(default_factory=dict)  # the scheduler's config; empty: that of published models
    guidance_embedding: float | None = None  # the setting of that name; None: the family's usual number
    references: Sequence[Tensor] = ()  # [B, C, h, w] each, in the form of the noisy latent; their sizes may differ
    conditioner: Any = None  # the model of `Family.conditioner`; None: the family has none
    inpaint_mask: Tensor | None = None  # [B, M, h, w] of a family that inpaints, 1: to be painted, 0: to be kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """What a pipeline is given for one sample picture."""

    positive: TextArrays  # of one row
    negative: TextArrays
    latent_1Chw: Tensor  # noise
    size: Size  # of the picture, in pixels
    guidance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePipeline:
    """How a family's pipeline makes a sample picture of text rows."""

    # Arguments of the pipeline's __call__: embeddings, latents as it expects them, guidance.
    call: Callable[[Any, Prompted], Mapping[str, Any]]
    unpack: Callable[[Any, Tensor, Size], Tensor]  # model, the pipeline's latents, size → latents [1, C, h, w]
    sampler: str  # diffusers class of the scheduler
    sampler_options: Mapping[str, Any] = field(default_factory=dict)  # overrides of the model's own scheduler config
    solvers: Solvers = field(default_factory=dict)  # other schedulers that the pipeline of a flow works with
    guidance: float  # usual guidance scale
    vae: Callable[[Any], Any] | None = None  # by the denoiser: what the pipeline takes for a VAE; None: it needs none
    prepare: Callable[[Any, Prompted], None] | None = None  # changes the pipeline for a picture
    parts: Mapping[str, Any] = field(default_factory=dict)  # what its constructor asks for, beside those given
    pipeline: str | None = None  # diffusers class that makes them; None: the model's own


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """How a family takes pictures as conditions, beside text."""

    most: int  # pictures of one sample
    resolution: int  # side in pixels of the square whose area its pipeline scales larger pictures down to
    # How its pipeline scales and crops a picture of this size (after orientation), given that side; None: the picture
    # is too small.
    place: Callable[[Size, int], Placement | None]
    # The denoiser's arguments, by name, with references [B, C, h, w] in the form of the noisy latent, behind the tokens
    # of the noise in `hidden_states`; also where a pipeline makes sample pictures.
    append: Callable[[Mapping[str, Any], Sequence[Tensor]], Mapping[str, Any]]
    leading: bool = False  # whether `append` puts them before the noise instead
    own_blocks: bool = False  # whether the denoiser has blocks that run with references only


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioner:
    """A small model that makes a denoiser's text of rows, where rows are not that themselves. It is loaded with the
    denoiser, and never trained."""

    component: str
    config_widths: Mapping[str, tuple[str, int]]  # as those of the denoiser
    joint: tuple[str, str]  # the key of its config, and that of the denoiser's, that must have one width


@dataclass(frozen=True, kw_only=True, slots=True)
class Inpainting:
    """How a family is told what to paint: by a mask, and by the latent of the picture with mid-gray where the mask is
    white. That latent is the one reference of each sample."""

    # What the mask has of each latent cell: one number, that of its first pixel; or as many channels as pixels, by row.
    cell: Literal["first", "all"]
    # The denoiser's input, from the noisy latent as it takes one, the mask [B, M, h, w] and the masked picture's latent
    # [B, C, h, w]; the latter two may be of one sample for several noisy latents.
    join: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraLayers:
    """The layers of a family's denoiser that a LoRA adapts, and what files call them."""

    presets: Mapping[str, tuple[str, ...]]  # suffixes of layer names, by the value of lora.targets
    kohya: Kohya | None  # kohya's names of tensors; None: not known, or nothing proves them
    further: tuple[Rule, ...] = ()  # names of the authors' code that are read, but never written
    original: Callable[[Iterable[str]], tuple[Rule, ...]] | None = None  # of a UNet: its authors' names, by its layers
    in_comfyui: bool = True  # whether ComfyUI 0.29 reads diffusers' names of tensors, all or some
    in_diffusers: bool = True  # whether diffusers' pipeline has `load_lora_weights`

    @property
    def formats(self) -> tuple[str, ...]:
        """The values of lora.format that the family has names for; first what "auto" means."""
        if self.kohya is None:
            return ("diffusers",)
        return ("kohya", "diffusers") if self.kohya.usual else ("diffusers", "kohya")


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """What the metadata of weights call a model, for programs that show and sort files."""

    architecture: str  # as sd-scripts (library/sai_model_spec.py) and SwarmUI (T2IModelClassSorter.cs) spell it
    version: str = ""  # ss_base_model_version, by which web UIs tell LoRA files apart; "": the family's name
    v2: bool | None = None  # ss_v2, of the UNets that sd-scripts trains; None: other denoisers


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Facts that hold for every model of a family."""

    name: str
    models: tuple[str, ...] = ()  # published models, as people call them
    pipelines: tuple[str, ...]  # the diffusers classes that model_index.json may name
    # Classes of models like its own that were distilled so that they cannot be trained: they are told the step's end.
    distilled: tuple[str, ...] = ()
    # Tells its models from those of other families with the same pipeline class; None: no other family has the class.
    fits: Callable[[Configs], bool] | None = None
    denoiser: str  # the component that is trained: unet or transformer
    # Tensors in files of the denoiser that are computed from its config: none is trained, or kept by a run.
    buffers: frozenset[str] = frozenset()
    components: Mapping[str, tuple[Class, ...]]  # the classes that each component may have
    library: str = ""  # that its text and sample pictures need, and other families do not; in the extra of its name
    optional: frozenset[str] = frozenset()  # components that may be absent
    latent_channels: int
    factor: int  # pixels per latent cell and side
    patch: int  # the denoiser refuses sides that are not multiples of this, in latent cells
    token: int | None = None  # latent cells of a side of what is one token; None: a patch
    step: int  # default bucket step in pixels
    resolution: int  # side of its training pictures, in pixels
    scaling_factor: str  # if the VAE's config has none; decimal strings: canonical JSON has no floats
    shift_factor: str
    batch_norm_eps: float | None = None  # of a VAE with a batch norm; None: that of its config
    predictions: tuple[Prediction, ...]  # what its denoisers may predict
    # The scheduler's config that the code of its modular pipeline has, if the index names none; None: it is in a file.
    schedule: Mapping[str, Any] | None = None
    # Keys of the denoiser's config that rows decide: the array whose last width each must equal, and times what.
    config_widths: Mapping[str, tuple[str, int]]
    conditioner: Conditioner | None = None  # None: text rows are what the denoiser is given
    # Most pixels of a side, and of a picture that is not square, by the denoiser's config; None: any.
    longest_side: Callable[[Mapping[str, Any]], int | None] | None = None
    largest_area: Callable[[Mapping[str, Any]], int | None] | None = None
    keeps_alpha: bool = False  # whether its VAE takes four channels, the last for opacity
    upcasts_vae: bool = False  # whether its pipeline computes a VAE with `force_upcast` in float32, not in float16
    # The prediction [B, C, h, w] of the denoiser for a noisy latent [B, C, h, w] at a time [B]: the timestep of a
    # diffusion model, the sigma (0 to 1) of a flow. For a flow the prediction is that of noise - latent.
    predict: Callable[[Any, Tensor, Tensor, Conditions], Tensor]
    # When `predict` calls the denoiser once for each length of text in its batch: "recomputing", with gradient
    # checkpointing.
    by_length: Literal["never", "recomputing", "always"] = "never"
    chooses_attention: bool = False  # whether diffusers lets the kernel of its denoiser's attention be chosen
    takes_guidance: bool = False  # whether `predict` gives the denoiser a number, if its config has guidance_embeds
    # The timesteps' shift by a picture's tokens and the scheduler's config, if that has dynamic shifting; None: FLUX's.
    shift: Callable[[int, Mapping[str, Any]], float] | None = None
    references: References | None = None  # None: it takes no pictures as conditions
    inpainting: Inpainting | None = None  # None: it paints whole pictures
    text: TextEncoding
    sampling: SamplePipeline
    lora: LoraLayers
    labels: Labels | Callable[[str, Configs], Labels]  # or by what is predicted and the model's configs

    def labels_of(self, prediction: str, configs: Configs) -> Labels:
        """What a model's weights are called. Raises `ModelError` if that takes a config which cannot be read."""
        return self.labels if isinstance(self.labels, Labels) else self.labels(prediction, configs)

    def require_library(self, instead: str = "") -> None:
        """Raises `UsageError` if the family's own library is not installed; `instead`: what else the hint offers."""
        if self.library and find_spec(self.library) is None:
            raise UsageError(f"text and sample pictures of family '{self.name}' need the package {self.library}, which "
                             "is not installed", hint=f"pip install 'latentry[{self.name}]'{instead}")

    @property
    def trained_with(self) -> tuple[str, ...]:
        """The components that a run loads, but for the VAE of sample pictures."""
        return (self.denoiser, *(() if self.conditioner is None else (self.conditioner.component,)))

    @property
    def mask_channels(self) -> int:
        """Numbers that a mask has for a latent cell."""
        return self.factor**2 if self.inpainting is not None and self.inpainting.cell == "all" else 1

    @property
    def input_channels(self) -> int:
        """Numbers that the denoiser is given for a latent cell."""
        return self.latent_channels if self.inpainting is None else 2 * self.latent_channels + self.mask_channels

    @property
    def most_references(self) -> int:
        """The most pictures that a prompt may name."""
        return self.references.most if self.references is not None else int(self.inpainting is not None)

    @property
    def token_side(self) -> int:
        """Pixels of a token's side."""
        return self.factor * (self.token or self.patch)

    @property
    def text_compute(self) -> str | None:
        """The dtype that text encoders compute in if the recipe does not say; `None`: that of the rows.

        CLIP computes in that of the rows. With T5 or a language model it is bfloat16: half the memory, and float16
        would overflow.
        """
        encoders = [known for name, known in self.components.items() if name.startswith("text_encoder")]
        return None if all(kind.startswith("CLIP") for known in encoders for _, kind in known) else "bfloat16"
