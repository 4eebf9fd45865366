"""Loads pipeline components: all weights from fingerprinted files, no code but the libraries' own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from prep.errors import ModelError, OutOfMemoryError, Problem, first_line
from prep.formatting import format_bytes
from prep.models.checkpoints.bounds import build, known_warnings, of_diffusers, require_room
from prep.models.checkpoints.converted import weights_of, weights_to_give
from prep.models.checkpoints.staging import staged
from prep.models.checkpoints.stored import DTYPES
from prep.models.checkpoints.streaming import Keep, Settle, compared, fill, names_in, without_weights
from prep.models.device.allocator import blocks_apart
from prep.models.device.host import available
from prep.models.device.memory import is_out_of_memory
from prep.models.device.offload import SHARED
from prep.models.files import ComponentFiles, Shape
from prep.models.weights import shapes_in
from prep.progress import Progress, silent


def as_it_is(_name: str, value: Any) -> Any:
    """Leaves each layer, or each parameter, as it is."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a model is wanted in memory."""

    dtype: torch.dtype  # of its floats, but for the parameters that its class keeps in float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    settle: Settle = as_it_is
    least: float | None = None  # bytes of a number of a matrix at least, where `settle` makes them fewer
    keep: Keep = as_it_is
    parts: int = 1  # of which `keep` keeps one

    def size(self, model: Any) -> int:
        """Bytes that `model` has at least in this form."""
        whole = self.dtype.itemsize
        return int(sum(value.numel() * (self.least if self.least and value.ndim == 2 else whole)
                       for value in model.parameters())) // self.parts


def load_diffusers(kind: Any, files: ComponentFiles, what: str, form: Form, progress: Progress = silent) -> Any:
    """Loads a model of class `kind`, of diffusers, in this form, all its weights from `files`; for inference.

    `what` names it in messages; `progress` counts bytes of weights. Raises `ModelError`, `OutOfMemoryError`.
    """
    doing = "loading" if form.least is None else "loading and quantizing"
    with _explained(files, what), blocks_apart():
        require_room(kind, files, partial(of_diffusers, kind, files))
        model = without_weights(kind, files)
        stored = weights_of(files, model)
        names = names_in(model, stored, files)
        refuse_holes(compared(model, stored, names), files.place)
        if form.device.type in SHARED:
            _require_memory(form.size(model), files, what)
        with progress(f"{doing} the {what}", sum(map(stored.size, names.values())), "bytes") as tick:
            fill(model, stored, names, form.dtype, form.device, form.settle, form.keep, tick)
    return model.eval()


def load_transformers(kind: Any, files: ComponentFiles, what: str, *, packages: str = "",
                      size: Callable[[Mapping[str, Shape]], int] | None = None, **options: Any) -> Any:
    """Loads a model of class `kind`, of transformers, into CPU memory, all its weights from `files`.

    `what` names it in messages, `packages` completes the hint on a missing package, and `options` go to
    `from_pretrained`. `size` says the bytes of weights of these shapes, by name; by default they have the dtype that is
    asked for. Raises `ModelError`, `OutOfMemoryError`.
    """
    dtype = _dtype_in(options)
    with _explained(files, what, packages), staged(files) as folder, known_warnings():
        require_room(kind, files, partial(build, kind, folder))
        shapes = {name: shape for name, shape in shapes_in(files.tensors).items() if unread([name])}
        _require_memory(size(shapes) if size else dtype.itemsize * sum(map(prod, shapes.values())), files, what)
        weights = weights_to_give(files, dtype)
        place: dict[str, Any] = {} if weights is None else {
            "config": kind.config_class.from_pretrained(folder, local_files_only=True), "state_dict": weights}
        model, loaded = kind.from_pretrained(
            folder if weights is None else None, use_safetensors=True, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **place, **options)
        refuse_holes(loaded, files.place)
        if weights is None:
            unmap(model, {DTYPES.get(tensor.dtype) for tensor in files.tensors.values()})
    return model


def _require_memory(size: int, files: ComponentFiles, what: str) -> None:
    """Raises `OutOfMemoryError` if the computer has not `size` bytes left: else the system may end this process."""
    left = available()
    if left is not None and left < size:
        raise OutOfMemoryError(f"the {what} in {files.place} takes {format_bytes(size)} of memory, and "
                               f"{format_bytes(left)} are available", hint=_LESS)


_LESS = ("end other programs; in training, a quantized denoiser takes less (quantization = \"fp8\" or \"nf4\"), and in "
         "encoding text encoders that are not loaded whole (--encoder-memory GIB)")


@contextmanager
def _explained(files: ComponentFiles, what: str, packages: str = "") -> Iterator[None]:
    """Loading, whose errors become messages that say what helps."""
    try:
        yield
    except Problem:
        raise
    except ImportError as error:
        raise ModelError(f"the {what} in {files.place} needs a package that is not installed: {said(error, files)}",
                         hint=f"install that package{packages}") from None
    except Exception as error:  # broken files make the libraries raise almost anything, even SafetensorError
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"there is too little memory to load the {what} in {files.place}",
                                   hint=_LESS) from None
        raise ModelError(f"cannot load the {what} in {files.place}: {said(error, files)}",
                         hint="download the model again; a model is a diffusers pipeline with safetensors") from None


def _dtype_in(options: Mapping[str, Any]) -> Any:
    """The dtype that weights are loaded as, from the arguments of `from_pretrained`."""
    return options.get("dtype", options.get("torch_dtype"))


def load_part(kind: Any, files: ComponentFiles, what: str) -> Any:
    """Loads a transformers config, tokenizer or image processor from `files`. Raises `ModelError`."""
    try:
        with staged(files) as folder:
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(f"cannot load the {what} of {files.place}: {said(error, files)}") from None


def said(error: Exception, files: ComponentFiles) -> str:
    """The first line of a library's error message, without the path of the staged directory."""
    words = first_line(error).split(" ")
    return " ".join(Path(word).name if "latentry-model-" in word else word for word in words)[:300]


def unmap(model: Any, stored: Collection[torch.dtype | None]) -> None:
    """Copies weights and buffers out of their mapped file, which could still change or be truncated. Those of a dtype
    that the file has not, `stored` being those that it has, were copied when they were cast.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        # With CB, it was quantized from what was mapped, and its two names are one tensor.
        if tensor.dtype in stored and getattr(tensor, "CB", None) is None:
            tensor.data = tensor.data.clone()


# Ends of names of tensors that weights may have and no model is filled with, and why that changes nothing.
HARMLESS: Mapping[str, str] = {
    "position_ids": "counts up from 0, as the library does where it is missing",
    "relative_position_index": "made anew from the config",
    "rotary_emb.inv_freq": "made anew from the config",
    "pos_embed": "as above: in a denoiser that learned its positions, they are read",
    "num_batches_tracked": "how long a batch norm was trained, which changes no value afterwards",
    "logit_scale": "CLIP's, for comparing pictures with texts",
    "text_projection.weight": "CLIP's, for the same; a class that projects has it",
    "visual_projection.weight": "as above",
    "lm_head.weight": "a language model's, for guessing the next word; rows are states before it",
}


def refuse_unknown_tokens(model: Any, place: Path) -> None:
    """Makes `model`, which reads texts and was loaded from `place`, raise `ModelError` for a token that it has no
    embedding of, as of a tokenizer with words added later. On a GPU such a token would end all work of the process."""
    try:
        count = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    except NotImplementedError:  # of a class that does not say which of its layers that is
        return

    def check(_: Any, given: tuple[Any, ...]) -> None:
        if given and given[0].numel() and (largest := int(given[0].max())) >= count:
            raise ModelError(f"the tokenizer for {place} makes the token {largest}, but the model knows {count}, "
                             "numbered from 0", hint="take tokenizer and text encoder of one model")

    for module in model.modules():  # T5's encoder has the same table once more
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == count:
            module.register_forward_pre_hook(torch.compiler.disable(check))  # type: ignore[no-untyped-call]


def refuse_holes(loaded: Mapping[str, Any], folder: Path) -> None:
    """Raises `ModelError` if tensors of the model in `folder` did not come from its files, or nothing reads some there.

    `loaded` is the report of `from_pretrained(output_loading_info=True)`. A library fills missing tensors with random
    numbers, and drops those that it does not know; weights whose format it does not know have such.
    """
    missing, other = sorted(loaded["missing_keys"]), sorted(str(key) for key, *_ in loaded["mismatched_keys"])
    surplus = unread(map(str, loaded["unexpected_keys"]))
    if missing:
        raise ModelError(f"the weights in {folder} lack {named(missing)}", hint=_OTHERS)
    if other:
        raise ModelError(f"the weights in {folder} do not have the shapes in its config.json: {named(other)}",
                         hint=_OTHERS)
    if surplus:
        raise ModelError(f"the weights in {folder} have tensors that nothing reads: {named(surplus)}",
                         hint=_OTHERS)


_OTHERS = "its config.json and weights are from different models or library versions; download both again"


def unread(names: Iterable[str]) -> list[str]:
    """Those of `names`, which nothing has read, that are not `HARMLESS`, sorted."""
    return sorted(name for name in names if not f".{name}".endswith(tuple(f".{end}" for end in HARMLESS))
                  and not name.startswith(_OF_PICTURES))


_OF_PICTURES = "vision_model."  # CLIP's other half, where a text encoder's weights are those of both


def named(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def dtype_keyword(transformers: str) -> str:
    """The name of the dtype argument of `from_pretrained` in this transformers version; the other warns or fails."""
    major, minor = transformers.split(".")[:2]
    return "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"


def quiet_libraries() -> None:
    """Limits diffusers, transformers and what they import to error messages, and turns off their progress bars."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it asks for kernels that are not used here
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    quiet_transformers()


def quiet_transformers() -> None:
    """The same for transformers alone: diffusers takes seconds to import."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
