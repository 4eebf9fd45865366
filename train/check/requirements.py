"""What settings need of libraries, of the device and of the number of ranks."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from prep.errors import ConfigError
from prep.models.family import Family
from prep.parse import brief
from prep.training.optimizers import OPTIMIZERS
from prep.training.schema import Config
from train.optim.optimizers import TABLE
from train.trackers.tracked import check_trackers

_ALONE = "encode the pictures alone: --references none --reference-fit family"
DIVIDES = (2, 9)  # the first torch that can add gradients over ranks instead of taking their mean


def check_libraries(config: Config, family: Family, *, references: bool = False, paired: bool = False) -> None:
    """Raises `ConfigError` if the library of a tracker or of the optimizer is not installed, if torch is too old, or
    diffusers computes the attention of the family's denoisers otherwise. `references`: whether the data have any;
    `paired`: whether they are pairs of pictures, for a slider."""
    check_trackers(config.log)
    name = config.optimizer.name
    facts = TABLE[name]
    if facts.library and find_spec(facts.library) is None:
        raise ConfigError(f"optimizer.name is '{name}', which needs the library {facts.library}",
                          hint=f"pip install 'latentry[{facts.extra}]'")
    _require_torch(facts.torch, f"optimizer.name is '{name}', which needs", "--set optimizer.name=adamw")
    _check_attention(config, family)
    if config.base.adapter and config.method == "full":
        raise ConfigError("base.adapter is set, which is for the frozen base of a LoRA, but method is 'full'",
                          hint="--method lora; or add it to the model with train merge, and train that one")
    for kept, off in (("prior", "false"), ("unmasked", "0"), ("prompted", "0")):
        if getattr(config.preserve, kept) and config.method == "full":
            raise ConfigError(f"preserve.{kept} is on, which is for the frozen base of a LoRA, but method is 'full'",
                              hint=f"--method lora, or --set preserve.{kept}={off}")
    if config.slider.on or paired:
        _check_slider(config, paired=paired)
    if config.quantization != "none":
        _check_quantized(config)
    if config.parallel.shard:
        _check_divided(config, family, references)
    if config.offload:
        _check_offloaded(config)
    if config.method == "full":
        _check_whole(config)
    if config.sample.model:
        _check_drawn(config)


def _check_slider(config: Config, *, paired: bool) -> None:
    """Raises `ConfigError` for settings of runs whose weights cannot be subtracted from the base as well, and for a
    slider of prompts where the data are pairs."""
    if config.slider.on and paired:
        raise ConfigError("slider is on, which trains a slider between two prompts, but the pictures are pairs, which "
                          "train one between themselves",
                          hint=f"leave slider out of the settings, or {_ALONE}")
    what, otherwise = ("slider is on, which trains", "leave slider out of the settings") if not paired else (
        "the pictures are pairs, which train", _ALONE)
    for name, wrong, why, way in (
            ("method", config.method == "full", "is 'full', which trains the model's own weights", "--method lora"),
            ("lora.init", config.lora.init == "pissa", "is 'pissa', whose adapters are a part of the base",
             "--set lora.init=kaiming"),
            ("lora.dora", config.lora.dora, "is on, which trains lengths of the base's rows", "--set lora.dora=false")):
        if wrong:
            raise ConfigError(f"{what} adapters at weight 1 and -1, but {name} {why}",
                              hint=f"{way}, or {otherwise}")


def _check_drawn(config: Config) -> None:
    """Raises `ConfigError` for settings of runs whose weights no other model can draw with."""
    for name, wrong, why, way in (
            ("method", config.method == "full", "is 'full', which trains the model's own weights", "--method lora"),
            ("lora.init", config.lora.init == "pissa", "is 'pissa', whose adapters only suit the base that they were "
             "taken out of", "--set lora.init=kaiming"),
            ("parallel.shard", config.parallel.shard, "is on, which divides the model among the GPUs", "--no-shard")):
        if wrong:
            raise ConfigError(f"sample.model is set, which draws with the adapters of a LoRA, but {name} {why}",
                              hint=f"{way}, or --set sample.model= for pictures of the trained model")


def _check_whole(config: Config) -> None:
    """Raises `ConfigError` for settings that weights in bfloat16, or updates in the backward pass, cannot have."""
    optimizer, fused, half = config.optimizer.name, config.full.fused_backward, config.full.dtype == "bfloat16"
    is_half, is_fused = "full.dtype is 'bfloat16', which", "full.fused_backward is on, which"
    either, usual = is_fused if fused else is_half, "full.fused_backward=false" if fused else "full.dtype=float32"
    for wrong, why, way, off in (
            (half and config.precision in ("fp16", "fp32"), f"{is_half} needs forward passes in bf16, but precision is "
             f"'{config.precision}'", "--precision bf16", "full.dtype=float32"),
            (fused and config.precision == "fp16", f"{is_fused} updates weights before all gradients are known, but "
             "precision is 'fp16', which skips steps whose gradients overflow", "--precision bf16", usual),
            ((fused or half) and not OPTIMIZERS[optimizer].singly, f"{either} updates one weight at a time, but "
             f"optimizer.name is '{optimizer}', which needs all of them", "--set optimizer.name=adamw", usual),
            ((fused or half) and config.parallel.shard, f"{either} is for models that are not divided, but "
             "parallel.shard is on", "--no-shard", usual),
            (fused and config.micro_batch < config.batch_size, f"{is_fused} updates weights in each backward pass, but "
             f"batch_size {config.batch_size} has several, of micro_batch {config.micro_batch}",
             f"--micro-batch {config.batch_size}, or --batch-size {config.micro_batch}", usual)):
        if wrong:
            raise ConfigError(why, hint=f"{way}, or --set {off}")


def _check_offloaded(config: Config) -> None:
    """Raises `ConfigError` for settings that need all of the model on the device."""
    for name, wrong, why, way in (
            ("method", config.method == "full", "is 'full', which trains them", "--method lora"),
            ("gradient_checkpointing", not config.recomputes, "is off, which keeps weights on the GPU from "
             "the forward to the backward pass", "--set gradient_checkpointing=true"),
            ("compile", config.compile, "is on, which needs weights that stay where they are", "--no-compile"),
            ("parallel.shard", config.parallel.shard, "is on, which divides the weights among the GPUs", "--no-shard")):
        if wrong:
            raise ConfigError(f"offload is {brief(config.offload)}, which keeps frozen blocks of a LoRA's base in "
                              f"system RAM, but {name} {why}", hint=f"{way}, or --set offload=0")


def _check_attention(config: Config, family: Family) -> None:
    """Raises `ConfigError` if a kernel of attention is named for a family whose denoisers use PyTorch's own."""
    if config.attention != "native" and not family.chooses_attention:
        raise ConfigError(f"attention is '{config.attention}', but denoisers of family '{family.name}' compute it with "
                          "PyTorch's own", hint="--set attention=native")


def _check_quantized(config: Config) -> None:
    """Raises `ConfigError` for settings that need the base's weights as they are, or without the library."""
    lora, kind = config.lora, config.quantization
    for name, wrong, way in (("method", config.method == "full", "--method lora"),
                             ("lora.kind", lora.kind != "lora", "--set lora.kind=lora"),
                             ("lora.dora", lora.dora, "--set lora.dora=false"),
                             ("lora.init", lora.init != "kaiming", "--set lora.init=kaiming"),
                             ("parallel.shard", config.parallel.shard, "--no-shard")):
        if wrong:
            raise ConfigError(f"quantization is '{kind}', which is for the frozen base of a LoRA as lora.kind 'lora' "
                              f"adds it, but {name} needs the weights as they are",
                              hint=f"{way}, or --set quantization=none")
    if kind == "nf4" and find_spec("bitsandbytes") is None:
        raise ConfigError("quantization is 'nf4', which needs the library bitsandbytes",
                          hint="pip install 'latentry[bnb]', or --set quantization=fp8")


def _check_divided(config: Config, family: Family, references: bool) -> None:
    """Raises `ConfigError` for settings that a divided model cannot have, or if torch is too old for it."""
    name = config.optimizer.name
    if not TABLE[name].elementwise:
        raise ConfigError(f"optimizer.name is '{name}', which needs whole weights, but parallel.shard divides them",
                          hint="--set optimizer.name=adamw, or --no-shard")
    whole = [name for name in ("channels_last", "compile") if getattr(config, name)]
    if whole:
        raise ConfigError(f"{whole[0]} is on, which is only for models that are not divided, but parallel.shard is on",
                          hint=f"--set {whole[0]}=false, or --no-shard")
    if (config.ema.decay or config.ema.snapshots) and config.ema.device != "model":
        raise ConfigError(f"ema.device is '{config.ema.device}', which is only for models that are not divided, but "
                          "parallel.shard is on: each rank has its part of the average beside that of the weights",
                          hint="--set ema.device=model, or --no-shard")
    recomputing = family.by_length == "recomputing" and config.gradient_checkpointing is not False
    if config.micro_batch > 1 and (family.by_length == "always" or recomputing):
        raise ConfigError(f"micro_batch is {config.micro_batch}, expected 1 where parallel.shard divides a denoiser of "
                          f"family '{family.name}': it has a pass for each length of captions, and all ranks must have "
                          "as many", hint="--micro-batch 1, or --no-shard")
    if references and family.references is not None and family.references.own_blocks:
        raise ConfigError(f"parallel.shard is on, but denoisers of family '{family.name}' have blocks that run with "
                          "references only, and all ranks must run the same", hint="--no-shard")
    _require_torch(DIVIDES, "parallel.shard needs", "--no-shard")


def _require_torch(least: tuple[int, int], what: str, otherwise: str) -> None:
    """Raises `ConfigError` if torch is older; `what` begins the message, `otherwise` ends the hint."""
    installed = version("torch")
    if tuple(int(part) for part in installed.split(".")[:2]) < least:
        raise ConfigError(f"{what} torch {'.'.join(map(str, least))} or later, but {installed} is installed",
                          hint=f"install a later torch, or {otherwise}")


def too_many_ranks(config: Config, world: int) -> ConfigError | None:
    """What is wrong if a step has fewer samples than there are ranks, or if there may be only one."""
    if config.batch_size < world:
        return ConfigError(f"batch_size is {config.batch_size}, but {world} ranks divide a step's samples",
                           hint=f"--batch-size {world} or more, or start fewer processes")
    if world > 1 and config.method == "full" and config.full.fused_backward:
        return ConfigError(f"full.fused_backward is on, which updates weights before gradients are summed, but {world} "
                           "ranks have a part of them each",
                           hint="--set full.fused_backward=false, or start one process")
    return None


def check_testable(config: Config) -> None:
    """Raises `ConfigError` if the optimizer has no learning rate that a test with a rising one could find."""
    name = config.optimizer.name
    if name == "prodigy":
        raise ConfigError("optimizer.name is 'prodigy', which finds its learning rate itself, so --find-lr has nothing "
                          "to find", hint="omit --find-lr, and leave optimizer.lr at 1")
    if TABLE[name].averages:
        raise ConfigError(f"optimizer.name is '{name}', whose average would be one over all rates that --find-lr tries",
                          hint="take 1 to 10 times what --find-lr --set optimizer.name=adamw suggests")


def needs_device(config: Config) -> bool:
    """Whether the settings need a certain kind of device, or what a device of its kind needs."""
    return config.compile or config.attention != "native" or bool(TABLE[config.optimizer.name].device)


def check_device(config: Config, kind: str) -> None:
    """Raises `ConfigError` if the optimizer or the kernel of attention does not work on a device of this kind."""
    if config.attention != "native" and kind != "cuda":
        raise ConfigError(f"attention is '{config.attention}', which needs cuda, but the device is {kind}",
                          hint="--device cuda on a machine that has it, or --set attention=native")
    needed = TABLE[config.optimizer.name].device
    if needed and kind != needed:
        raise ConfigError(f"optimizer.name is '{config.optimizer.name}', which needs {needed}, but the device is "
                          f"{kind}", hint=f"--device {needed} on a machine that has it, or --set optimizer.name="
                          f"{config.optimizer.name.removesuffix('-paged')}")
