"""The settings of a run, as frozen records: this is the only place that says what they are.

`prep.training.table` lists them for `train init`, the reference page, the checks and the converters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prep.batching.policy import Shuffle, Underfill
from prep.models.denoiser.samplers import SAMPLERS
from prep.setting import line_check, setting
from prep.training.checks import (
    AUTO,
    IN_HOST,
    PRESETS,
    checkpointing_check,
    count_or_auto,
    layers_check,
    parts_check,
    prompts_check,
    size_check,
    switch_or_auto,
    targets_check,
    warmup_check,
)
from prep.training.interval import VALUES, interval_check
from prep.training.optimizers import OptimizerName

Method = Literal["lora", "full"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
Quantization = Literal["none", "fp8", "nf4", "int8", "fp8-w8a8"]
Attention = Literal["native", "cudnn", "flash", "flash-3", "xformers"]
Product = Literal["lora", "loha", "lokr"]
Begin = Literal["kaiming", "pissa"]
Format = Literal["auto", "kohya", "diffusers"]
Distribution = Literal["uniform", "logit-normal", "mode"]
Kind = Literal["manifest", "epsilon", "v_prediction", "flow"]
Weighting = Literal["none", "debiased", "cosmap", "inverse-square"]
SizeShift = Literal["none", "schedule", "area"]
Masked = Literal["auto"] | bool
ScheduleName = Literal["constant", "linear", "cosine", "cosine-restarts", "polynomial"]
AverageDevice = Literal["model", "cpu"]
Dtype = Literal["float32", "float16", "bfloat16"]
WeightDtype = Literal["float32", "bfloat16"]
ResultDtype = Literal["auto"] | Dtype
_PARTS = "a list of suffixes of module names, or 're:' and a regular expression of a weight's name"
STEPS = 2000  # when neither steps nor epochs are given
CAPTIONS = "{caption}"  # in place of a prompt: the caption of each sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What the frozen base of a LoRA is trained beside."""

    adapter: str = setting("", check=line_check, values="a LoRA file", resume=True,
                           help="a training adapter, as it is published for models distilled to few steps: it is on "
                           "while training and validating, never changes, and is neither in sample pictures nor in the "
                           "result; a path beside train.toml; empty: none")
    adapter_scale: float = setting(1.0, low=0, high=10, help="strength of the training adapter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters on the denoiser."""

    kind: Product = setting("lora", choices=get_args(Product),
                            help="what is added to a weight; loha: the elementwise product of two products (Hyeon-Woo "
                            "et al. 2022); lokr: a Kronecker product (Yeh et al. 2024); ComfyUI reads these, diffusers "
                            "does not")
    factor: int = setting(0, low=0, high=4096, help="lokr: sides of the smaller matrix; 0: as large as the other's")
    rank: int = setting(16, low=1, high=4096, help="rank of each adapter")
    alpha: float = setting(16.0, low=1e-6, high=1e6, derived="rank",
                           help="an adapter's output is scaled by alpha / rank")
    conv_rank: int = setting(16, low=1, high=4096, derived="rank", help="rank of adapters on convolutions larger than "
                             "1x1")
    conv_alpha: float = setting(16.0, low=1e-6, high=1e6, derived="conv_rank, or alpha without one",
                                help="alpha of adapters on convolutions larger than 1x1")
    rslora: bool = setting(False, help="scale by alpha / sqrt(rank) instead (Kalajdzievski 2023); files hold the alpha "
                           "that means the same")
    dora: bool = setting(False, help="also train the length of each row of the weights (Liu et al. 2024); slower "
                         "steps; ComfyUI reads it in kohya's names, diffusers in its own")
    init: Begin = setting("kaiming", choices=get_args(Begin),
                          help="first values; kaiming: without effect; pissa: the principal part of each weight (Meng "
                          "et al. 2024), of which files hold the change, as a LoRA of twice the rank")
    dropout: float = setting(0.0, low=0, high=0.99, help="dropout before each adapter")
    targets: str | tuple[str, ...] = setting(
        "attention", check=targets_check, choices=(
            *PRESETS, "a list of suffixes of layer names, or 're:' and a regular expression"),
        help="layers that get an adapter; all-linear: attention and feed-forward of all blocks; kohya: what "
        "sd-scripts and musubi-tuner adapt, of a UNet proj_in and proj_out as well, of FLUX.1, Chroma, SD 3, Lumina 2 "
        "and Krea 2 every layer of the blocks; kohya-conv: a UNet's resnets, too, as LoCon")
    layers: tuple[dict[str, Any], ...] = setting(
        (), check=layers_check, values="a list of tables with match, and rank, alpha or lr",
        help="rank, alpha and learning rate of the layers that match, by the first that does: "
        "[{match = \"ff.net.2\", rank = 4}, {match = \"re:^up_blocks\", lr = 5e-5}]")
    format: Format = setting("auto", choices=get_args(Format), resume=True,
                             help="tensor names in the file; auto: kohya's for a UNet, Qwen-Image and Anima, else "
                             "those of diffusers; kohya: names that ComfyUI reads, of all families but PixArt, SANA, "
                             "Kolors, CogView4, Ovis-Image, LongCat-Image and FLUX.3; a run that an earlier version "
                             "began keeps its names")


@dataclass(frozen=True, kw_only=True, slots=True)
class Full:
    """Which weights of the denoiser are trained with method = "full", and how; the result holds all of them."""

    train: tuple[str, ...] = setting(
        (), check=parts_check, values=_PARTS,
        help="modules to train, with all inside them: [\"attn2\", \"re:^up_blocks\"]; empty: every one")
    freeze: tuple[str, ...] = setting(
        (), check=parts_check, values=_PARTS,
        help="modules that stay as they are, also among those to train")
    dtype: WeightDtype = setting("float32", choices=get_args(WeightDtype),
                                 help="dtype of the weights and their gradients; bfloat16: half the memory, without a "
                                 "copy in float32; updates are rounded stochastically, so that small ones are not lost")
    fused_backward: bool = setting(False, help="update each weight within the backward pass, as soon as its gradient "
                                   "is there, and free that: less memory; optimizer.clip then is for the gradient of "
                                   "each weight by itself; needs micro_batch as large as batch_size, and one process")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How gradients change the weights."""

    name: OptimizerName = setting("adamw", choices=get_args(OptimizerName),
                                  help="the optimizer; 8bit needs the extra bnb; lion, prodigy and schedule-free need "
                                  "the extra optimizers")
    lr: float = setting(1e-4, low=0, high=100, resume=True, derived="usual for the optimizer; 1 for prodigy",
                        help="learning rate")
    betas: tuple[float, float] = setting((0.9, 0.999), low=0, high=0.999999, derived="usual for the optimizer",
                                         help="decay of the two moments")
    eps: float = setting(1e-8, low=1e-30, high=1, help="added to the denominator; not of adafactor and lion")
    weight_decay: float = setting(0.01, low=0, high=100, help="decoupled weight decay")
    momentum: float = setting(0.95, low=0, high=0.999999, help="muon: momentum of matrices; AdamW trains the rest")
    d_coef: float = setting(1.0, low=1e-3, high=1e3, help="prodigy: factor of the learning rate that it estimates")
    bias_correction: bool = setting(False, help="prodigy: correct the moments of the first steps, as Adam does")
    safeguard_warmup: bool = setting(False, help="prodigy: keep a warm-up from raising the estimate")
    clip: float = setting(1.0, low=0, help="largest gradient norm of a step; 0: no clipping")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate over the steps, as a factor of optimizer.lr."""

    name: ScheduleName = setting("constant", choices=get_args(ScheduleName),
                                 help="the learning rate after the warm-up; all but constant fall until the last step")
    warmup: int | float = setting(0, check=warmup_check, values="steps, 0 or more, or a fraction of the run: 0.05",
                                  help="steps of linear warm-up, or a fraction of all steps")
    floor: float = setting(0.0, low=0, high=1, help="fraction of optimizer.lr that the schedule falls to")
    cycles: int = setting(1, low=1, help="cosine-restarts: how often it falls, each time from the full rate")
    power: float = setting(1.0, low=1e-3, high=100, help="polynomial: exponent of the fall; 1: linear, above 1: faster "
                           "at first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The error of the prediction, squared or Huber's, weighted by mask, sample and timestep."""

    masked: Masked = setting("auto", check=switch_or_auto, choices=("auto", "true", "false"),
                             help="use masks; auto: if the manifest has any, and the model does not paint into them")
    unmasked_weight: float = setting(0.1, low=0, high=1, help="weight of a cell whose mask is 0")
    normalize_area: bool = setting(False, help="divide each sample's loss by the mean of its own mask")
    min_snr: float = setting(0.0, low=0, high=1e6,
                             help="gamma of Min-SNR weighting (Hang et al. 2023), usually 5; 0: off")
    weighting: Weighting = setting("none", choices=get_args(Weighting),
                                   help="weight by noise level; debiased: 1/sqrt(SNR) for epsilon (Yu et al. 2023); "
                                   "for flows cosmap (Esser et al. 2024) or inverse-square: 1/sigma^2")
    huber: float = setting(0.0, low=0, high=1e3,
                           help="difference from which errors grow linearly, by Huber's loss; 0: squared everywhere")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preserve:
    """What a LoRA keeps of its base model, which predicts beside it without the adapters."""

    prior: bool = setting(False, help='samples with role "prior" teach what the base model predicts of them, and not '
                          "their pictures: any of the class will do")
    unmasked: float = setting(0.0, low=0, high=1e3,
                              help="weight of the difference to the base's prediction in cells, as far as their mask "
                              "takes weight from them: 1 minus that; 0: off")
    prompted: float = setting(0.0, low=0, high=1e3,
                              help="weight of the difference to the base's prediction of the same noisy sample for "
                              "another prompt than its caption: two forward passes and a backward pass more; 0: off")
    prompts: tuple[str, ...] = setting(
        ("",), check=prompts_check, values='a list of prompts, "": none',
        help="the other prompts, one of them by chance for each sample: none, or prompts of the manifest, which prep "
        'prompts adds: ["", "photo of a woman"]')


@dataclass(frozen=True, kw_only=True, slots=True)
class Slider:
    """A LoRA that moves pictures along what two prompts differ in, both ways, instead of learning the pictures: at
    weight 1 towards the one, at -1 towards the other."""

    positive: str = setting("", check=line_check, values='a prompt of the manifest, "": none',
                            example="photo of a very old person", help="what pictures become more of at weight 1")
    negative: str = setting("", check=line_check, values='a prompt of the manifest, "": none',
                            example="photo of a very young person", help="what they become more of at weight -1; no "
                            "slider is trained while it is the same as positive")
    neutral: str = setting(CAPTIONS, check=line_check, values=f'a prompt of the manifest, "": none, or {CAPTIONS}',
                           help=f"the prompt whose pictures move; {CAPTIONS}: the caption of each sample")
    strength: float = setting(3.0, low=0, high=1e3,
                              help="how far pictures move at weight 1, as a multiple of the difference of the two "
                              "predictions of the base")

    @property
    def on(self) -> bool:
        """Whether a slider is trained."""
        return self.positive != self.negative

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts whose rows it needs: positive, negative, and neutral unless that is the captions."""
        return self.positive, self.negative, *(() if self.neutral == CAPTIONS else (self.neutral,))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepDraws:
    """Which timesteps training draws; validation has its own. t is 0 for no noise and 1 for the most."""

    distribution: Distribution = setting("uniform", choices=get_args(Distribution),
                                         help="of t, before the shift (Esser et al. 2024, section 3.1)")
    mean: float = setting(0.0, low=-10, high=10, help="logit-normal: mean of the logit; above 0: more noise")
    std: float = setting(1.0, low=1e-3, high=10, help="logit-normal: standard deviation of the logit")
    mode_scale: float = setting(1.29, low=-1, high=1.75, help="mode: above 0 favors the middle of the schedule")
    shift: float = setting(1.0, low=0.01, high=100, help="moves t to shift·t / (1 + (shift - 1)·t), on top of the "
                           "schedule's own; above 1: more noise")
    shift_by_size: SizeShift = setting("none", choices=get_args(SizeShift),
                                       help="a further shift of flows by each picture's size; schedule: the one that "
                                       "grows with its tokens, of a scheduler's config with dynamic shifting; area: "
                                       "sqrt(area) / base_side (Esser et al. 2024, equation 23)")
    base_side: int = setting(1024, low=8, high=1 << 20,
                             help="shift_by_size area: side in pixels of the square with a further shift of 1")
    low: float = setting(0.0, low=0, high=1, help="least t")
    high: float = setting(1.0, low=0, high=1, help="largest t")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseDraws:
    """What is mixed into the noise that training draws; validation has plain noise."""

    offset: float = setting(0.0, low=0, high=10,
                            help="noise offset (Guttenberg 2023), usually 0.05 to 0.1: a normal number times this is "
                            "added to each channel; not for flows; 0: off")
    pyramid: float = setting(0.0, low=0, high=1,
                             help="multi-resolution noise (Whitaker 2023), usually 0.3 to 0.9: noise of lower "
                             "resolutions, each times this factor more, is added; not for flows; 0: off")
    pyramid_levels: int = setting(10, low=1, high=32, help="most resolutions of the pyramid, the latent's included")
    perturbation: float = setting(0.0, low=0, high=10,
                                  help="input perturbation (Ning et al. 2023), usually 0.1: the input has additional "
                                  "noise times this, the target does not; 0: off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """An exponential moving average of the trained weights; when on, it is the run's result."""

    decay: float = setting(0.0, low=0, high=0.9999999, help="decay per step; 0: off")
    device: AverageDevice = setting("model", choices=get_args(AverageDevice), resume=True,
                                    help="where it is kept and updated; model: beside the weights; cpu: in "
                                    "system RAM, which takes none of the GPU's")
    snapshots: bool = setting(False, help="keep two more averages at each checkpoint, also of checkpoints that are "
                              "removed: train merge RUN --ema 0.1 makes an average of any length of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The loss on held-out samples, with noise and timesteps that never change."""

    every: int | str = setting(200, check=interval_check, values=VALUES, resume=True,
                               help="steps between validations, or epochs: \"1 epoch\", \"0.5 epochs\"; 0: never")
    timesteps: int = setting(4, low=1, high=1000, help="timesteps per sample, spread evenly over the noise schedule")
    most: int = setting(64, low=0, resume=True, help="at most so many samples are validated, spread evenly over all "
                        "held-out ones; 0: all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sample pictures while training; a prompt's own --w --h --d --s --l take precedence."""

    every: int | str = setting(200, check=interval_check, values=VALUES, resume=True,
                               help="steps between sample pictures, or epochs: \"1 epoch\", \"0.5 epochs\"; 0: never")
    steps: int = setting(25, low=1, high=1000, resume=True, help="sampler steps")
    guidance: float | None = setting(None, low=1, high=100, example=7.5, resume=True,
                                     derived="the usual one of the model family", help="guidance scale; 1: off")
    sampler: str | None = setting(None, choices=SAMPLERS, example="EulerDiscreteScheduler", resume=True,
                                  derived="the usual one of the model family",
                                  help="diffusers' scheduler; train check names those that the model can be sampled "
                                  "with")
    model: str = setting("", check=line_check, values="a model", resume=True,
                         help="another model of the same family, which draws the pictures of a LoRA with its adapters: "
                         "that distilled to few steps, where the one that it was made of is trained; named as with "
                         "--model, a path from the directory of train.toml; empty: the trained model")
    seed: int = setting(0, low=0, high=(1 << 63) - 1, resume=True, help="seed of the initial noise")
    size: tuple[int, int] | None = setting(
        None, check=size_check, values="[width, height], multiples of 8", example=(512, 512), resume=True,
        derived="the bucket with the most samples", help="size of the pictures in pixels")
    wait: int = setting(120, low=0, high=86400, resume=True, help="seconds to wait for a process that encodes edited "
                        "prompts, under torchrun at most 3600; 0: skip those without text rows")
    encode: Literal["cpu", "cuda"] = setting("cpu", choices=("cpu", "cuda"), resume=True,
                                             help="device of that process")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluating:
    """Evaluation of checkpoints as they are saved, which train evaluate goes on with; [sample] says what is drawn."""

    every: int = setting(0, low=0, resume=True,
                         help="evaluate each N-th checkpoint of checkpoint.every, and the last one: draw, embed and "
                         "score its pictures, as train evaluate does; the manifest needs embeddings; 0: none")
    seeds: int = setting(4, low=1, high=1000, resume=True,
                         help="pictures of each prompt, with one seed after the other")
    neutral: str = setting("", check=line_check, values="a file of prompts", resume=True,
                           help="prompts whose pictures should stay as the base model draws them; a path beside "
                           "train.toml; empty: no prompt")
    embed: str = setting("", check=line_check, values="a model", resume=True,
                         help="the vision model that made the manifest's embeddings, a Hub id, or a directory beside "
                         "train.toml; empty: that in the options of its prep encode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When the whole training state is saved."""

    every: int | str = setting(500, check=interval_check, values=VALUES, resume=True,
                               help="steps between checkpoints, or epochs: \"1 epoch\", \"0.5 epochs\"; 0: only "
                               "the last")
    keep: int = setting(3, low=0, resume=True, help="newest checkpoints to keep; 0: all")
    copy_gib: float = setting(4.0, low=0, high=1 << 20, resume=True,
                              help="a checkpoint of at most so many GiB is copied to system RAM and written "
                              "while training goes on; larger ones are waited for; 0: all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How several processes train together; one process ignores it."""

    shard: bool = setting(False, resume=True, help="divide the model, its gradients and what the optimizer keeps among "
                          "the processes (FSDP2), for models that do not fit on one GPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging:
    """What a run shows of itself, besides log.jsonl."""

    plot: bool = setting(True, resume=True, help="draw loss.png at each checkpoint")
    tensorboard: bool = setting(False, resume=True, help="write numbers and sample pictures for TensorBoard into "
                                "RUN/tensorboard; needs the extra tensorboard")
    wandb: str = setting("", check=line_check, values="a line of text", resume=True, help="project of Weights & Biases "
                         "to send them to; needs the extra wandb, and wandb login; empty: none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The file of the trained weights, and what it says of itself in the metadata that web UIs show."""

    dtype: ResultDtype = setting("auto", choices=("auto", *get_args(Dtype)), resume=True,
                                 help="dtype of the weights; auto: of all weights that of the base's files, of a LoRA "
                                 "float32; checkpoints stay in that of training")
    title: str | None = setting(None, check=line_check, values="a line of text", example="Red hearts", resume=True,
                                derived="the manifest's name", help="name that web UIs show")
    author: str = setting("", check=line_check, values="a line of text", resume=True, help="who made it")
    description: str = setting("", check=line_check, values="a line of text", resume=True, help="what it is for")
    license: str = setting("", check=line_check, values="a line of text", resume=True, help="its license")
    trigger: str = setting("", check=line_check, values="a line of text", resume=True,
                           help="words of a prompt that show what was learned")
    tags: bool = setting(True, resume=True, help="count the parts of captions between commas: ss_tag_frequency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    method: Method = setting("lora", choices=get_args(Method), help="train a LoRA, or every weight of the denoiser")
    steps: int | None = setting(None, low=1, example=STEPS, resume=True, help="optimizer steps in total")
    epochs: int | None = setting(None, low=1, example=10, resume=True, derived="none",
                                 help="epochs in total, instead of steps")
    batch_size: int = setting(4, low=1, high=1 << 20, help="samples per optimizer step")
    micro_batch: int = setting(4, low=1, high=1 << 20, derived="batch_size", resume=True,
                               help="samples per forward pass; smaller takes less memory")
    underfill: Underfill = setting("partial", choices=get_args(Underfill),
                                   help="what to do with a bucket's last, incomplete micro-batch")
    shuffle: Shuffle = setting("global", choices=get_args(Shuffle),
                               help="which samples may meet in a micro-batch; global: any; partitioned: one of each of "
                               "micro_batch equal parts, so that each of several computers downloads its own part of a "
                               "cache, and not all of it")
    seed: int = setting(0, low=0, high=(1 << 63) - 1, help="random seed")
    precision: Precision = setting("auto", choices=get_args(Precision),
                                   help="precision of the forward pass; auto: bf16 if the GPU supports it; fp16, for "
                                   "older GPUs, scales the loss and skips steps whose gradients overflow")
    prediction: Kind = setting("manifest", choices=get_args(Kind),
                               help="what the denoiser predicts; manifest: as the manifest says")
    zero_terminal_snr: bool = setting(
        False, help="rescale the noise schedule so that its last timestep is pure noise (Lin et al. 2024, algorithm "
        "1); for diffusion models that predict v; sample pictures then take trailing timesteps")
    guidance_embedding: float | None = setting(
        None, low=0, high=100, example=3.5, derived="3.5, for a model that takes one",
        help="the guidance number that the denoiser is given in training, if it takes one; for FLUX.1 dev 1.0 is "
        "common, too")
    caption_dropout: float = setting(0.0, low=0, high=1,
                                     help="probability that a caption is replaced by the unconditional row")
    reference_dropout: float = setting(0.0, low=0, high=1,
                                       help="probability that a picture is shown without any of its references: the "
                                       "model then still works without")
    each_reference_dropout: float = setting(0.0, low=0, high=1,
                                            help="probability, for each reference, that a picture is shown without it")
    quantization: Quantization = setting("none", choices=get_args(Quantization),
                                         help="keep the frozen weights of a LoRA's base in 8 bits (float8 with a scale "
                                         "for each row) or 4 (NF4, Dettmers et al. 2023; needs the extra bnb): larger "
                                         "models fit, steps are slower; int8 and fp8-w8a8: 8 bits that are also "
                                         "multiplied as such, inputs and gradients rounded to them: products off by "
                                         "about 1 and 4 %; fp8-w8a8 for NVIDIA GPUs from Ada on")
    gradient_checkpointing: bool | str = setting(
        AUTO, check=checkpointing_check, values=f'true, false, "{AUTO}" or "{IN_HOST}"', resume=True,
        help="recompute activations: less memory, slower steps, the same numbers; auto: with offload, "
        "and if a pass over the largest bucket runs out of memory without (with --shard, if the estimate does not "
        "fit); offload: what the blocks are recomputed from waits in system RAM")
    offload: int | str = setting(0, check=count_or_auto, values='blocks, 0 or more, or "auto"', resume=True,
                                 help="keep the frozen weights of so many of the denoiser's blocks in system RAM, and "
                                 "copy each to the GPU ahead of its use: larger models fit, steps may be slower and "
                                 "stay the same; for a LoRA with gradient_checkpointing; auto: as few as memory allows")
    tf32: bool = setting(False, resume=True, help="multiply float32 matrices with TF32's 10 bits on NVIDIA GPUs: much "
                         "faster where the precision is fp32")
    channels_last: bool = setting(False, resume=True, help="keep convolutions' weights with channels last: often "
                                  "faster on GPUs for a UNet in bf16")
    attention: Attention = setting("native", choices=get_args(Attention), resume=True,
                                   help="kernel of attention on NVIDIA GPUs, of families whose denoisers let it be "
                                   "chosen; native: the one that PyTorch chooses; flash and flash-3 need the package "
                                   "flash-attn of that version, and take no padded texts; xformers needs xformers")
    compile: bool = setting(False, resume=True, help="compile the repeated blocks of the denoiser by torch.compile: "
                            "faster steps, after a slow first one for each shape")
    base: Base = field(default_factory=Base)
    lora: Lora = field(default_factory=Lora)
    full: Full = field(default_factory=Full)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    timesteps: TimestepDraws = field(default_factory=TimestepDraws)
    noise: NoiseDraws = field(default_factory=NoiseDraws)
    loss: Loss = field(default_factory=Loss)
    preserve: Preserve = field(default_factory=Preserve)
    slider: Slider = field(default_factory=Slider)
    ema: Ema = field(default_factory=Ema)
    validation: Validation = field(default_factory=Validation)
    sample: Sampling = field(default_factory=Sampling)
    evaluate: Evaluating = field(default_factory=Evaluating)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    parallel: Parallel = field(default_factory=Parallel)
    log: Logging = field(default_factory=Logging)
    result: Result = field(default_factory=Result)

    @property
    def recomputes(self) -> bool:
        """Whether gradient checkpointing is on from the first pass; with "auto" a trial may turn it on."""
        return self.gradient_checkpointing in (True, IN_HOST) or (
            self.gradient_checkpointing == AUTO and bool(self.offload))
