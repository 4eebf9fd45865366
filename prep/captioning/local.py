"""Describes pictures with a model on this computer: any that transformers calls image-text-to-text, such as Qwen-VL,
Florence-2, LLaVA, Gemma 3 or BLIP. Local safetensors files, no code but the library's own.

The weights are loaded when a picture is first asked about: what decides an answer is a digest of the files, as for
encoders. A model with a chat template is asked as its template says, which a worker renders; any other gets the prompt
as it is. Qwen-VL's pictures are prepared by Pillow, since the library's own way needs torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
import transformers
from transformers import StoppingCriteria

from prep.captioning.engine import PROMPT, Answer, Form, Prepared, Stopped, Unanswered, spoken
from prep.digest import digest_bytes, digest_json
from prep.errors import ModelError, OutOfMemoryError, Problem
from prep.fs.untrusted import read_regular
from prep.models.device.memory import FittingBatches, move
from prep.models.files import TOKENIZER_BYTES, ComponentFiles, parse_config
from prep.models.fingerprint import FileDigest, digest_weighted
from prep.models.hub import SINGLE, locate_directory
from prep.models.loading import dtype_keyword, load_part, load_transformers, quiet_transformers, said
from prep.models.pipeline import single_model_files
from prep.models.tensors import pick_device
from prep.models.text.chat import SERVICE, render
from prep.models.text.vision import load_processor
from prep.progress import Progress, phase
from prep.workers.pool import WorkerPool

TEMPLATE = "chat_template.jinja"  # where models keep it now; older ones have it in one of the next files
_TEMPLATES = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # model types
# What a model without a chat template is asked by default. Florence-2 knows tasks, by words of its own:
# https://huggingface.co/florence-community/Florence-2-base. BLIP goes on from what it is given, or begins by itself.
PROMPTS = {"florence2": "<MORE_DETAILED_CAPTION>"}


class LocalModel:
    """A model in a directory; an `Engine`. One thread at a time asks it."""

    form: Form = "pixels"
    at_once = 1

    def __init__(self, named: str, *, download: bool, device: str, batch_size: int, max_tokens: int,
                 temperature: float | None, file_digest: FileDigest, progress: Progress) -> None:
        """`named`: a directory or a Hub id. Reads all of its files. Raises `ModelError`, `UsageError`."""
        quiet_transformers()
        self.name, self.batch = named, batch_size
        self._device, self._progress = pick_device(device), progress
        folder = locate_directory(named, download=download, parts=(*SINGLE, "*.jinja"))
        self._files = single_model_files(folder)
        self._config = load_part(transformers.AutoConfig, self._files, "config")
        if type(self._config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise ModelError(f"the model in {folder} has type {self._config.model_type}, expected one that describes "
                             "pictures", hint="for example Qwen/Qwen2.5-VL-3B-Instruct, or "
                             "florence-community/Florence-2-base")
        self._template = _template_of(self._files)
        self._dtype = _dtype_for(self._device, self._files)
        with phase(progress, "reading the model"):
            digest = digest_json({"kind": "describer", "parts": digest_weighted(self._files, file_digest),
                                  "files": [[name, digest_bytes(data)] for name, data in self._files.small.items()],
                                  "template": self._template})
        self.identity: Mapping[str, str | int | None] = {
            "engine": "transformers", "model": digest, "dtype": str(self._dtype), "max_tokens": max_tokens,
            "temperature": None if temperature is None else f"{temperature:g}"}
        self._options = _generation(max_tokens, temperature)
        self._batches = FittingBatches(self._device, str(self._dtype), batch_size)
        self._closed, self._lock = Event(), Lock()
        self._loaded: tuple[Any, Reader] | None = None

    @property
    def prompt(self) -> str:
        """What this model is asked by default."""
        return PROMPT if self._template else PROMPTS.get(self._config.model_type, "")

    def describe(self) -> str:
        """Where pictures go, for people."""
        return f"on this computer ({self._device}, {str(self._dtype).removeprefix('torch.')})"

    def close(self) -> None:
        """Ends an answer under way after its next token."""
        self._closed.set()

    def answer(self, pictures: Sequence[Prepared], prompts: Sequence[str]) -> Sequence[Answer | Unanswered]:
        """The answers, as `Engine.answer`, in batches that the device holds."""
        with self._lock:
            model, reader = self._loaded = self._loaded or self._load()
            texts = [reader.asking(prompt) for prompt in prompts]

            def forward(numbers: Sequence[int]) -> list[Answer]:
                return self._forward(model, reader, [pictures[number] for number in numbers],
                                     [texts[number] for number in numbers])

            answers: dict[int, Answer] = {}
            try:
                for numbers in reader.alike(texts):
                    answers.update(zip(numbers, self._batches.run(numbers, forward, "one picture"), strict=True))
                return [answers[number] for number in range(len(pictures))]
            except OutOfMemoryError as error:
                raise OutOfMemoryError(error.message, hint="a smaller --side, --device cpu, or a smaller model; what "
                                       "was answered is remembered") from None
            except (Stopped, Problem):
                raise
            except Exception as error:  # of a library: broken configs make it raise almost anything
                raise ModelError(f"the model in {self._files.place} cannot describe a picture: "
                                 f"{said(error, self._files)}",
                                 hint="download the model again, or choose another one") from None

    @torch.inference_mode()
    def _forward(self, model: Any, reader: Reader, pictures: Sequence[Prepared], texts: Sequence[str]) -> list[Answer]:
        read = reader.inputs([np.frombuffer(one.data, np.uint8).reshape(one.height, one.width, 3) for one in pictures],
                             texts)
        inputs = {name: value.to(self._device, self._dtype if value.is_floating_point() else None)
                  for name, value in read.items()}
        stop = _StopIf(self._closed)
        made_BL = model.generate(**inputs, **self._options, stopping_criteria=[stop])
        if self._closed.is_set():
            raise Stopped
        given = inputs["input_ids"] if "input_ids" in inputs else torch.empty(len(texts), 0)
        length = given.shape[1]
        if model.config.is_encoder_decoder:
            made_BL = made_BL[:, 1:]  # without the token that a decoder starts with, which BART also ends with
        elif length and torch.equal(made_BL[:, :length], given):
            made_BL = made_BL[:, length:]  # what follows the prompt
        ends, forced = model.generation_config.eos_token_id, model.generation_config.forced_eos_token_id
        last = {ends} if isinstance(ends, int) else set(ends or ())
        full, own = made_BL.shape[1] >= self._options["max_new_tokens"], None if forced is None else -1
        return [Answer(text=spoken(text), cut=full and not last & set(row[:own].tolist()))
                for text, row in zip(reader.texts(made_BL), made_BL, strict=True)]

    def _load(self) -> tuple[Any, Reader]:
        kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self._config)]
        with phase(self._progress, "loading the model"):
            options: dict[str, Any] = {dtype_keyword(transformers.__version__): self._dtype}
            model = load_transformers(kind, self._files, "model", trust_remote_code=False, **options)
            reader = Reader(self._files, self._config, self._template)
            return move(model.eval(), self._device, "the model", str(self._dtype)), reader


class Reader:
    """Makes a model's inputs of prompts and pictures, and texts of what it says."""

    def __init__(self, files: ComponentFiles, config: Any, template: str) -> None:
        """Raises `ModelError`."""
        self._template, self._place = template, files.folder
        self._qwen = config.model_type in QWEN
        if self._qwen:
            self.tokenizer = load_part(transformers.AutoTokenizer, files, "tokenizer")
            self._processor: Any = load_processor(files, self.tokenizer)
        else:
            self._processor = load_part(transformers.AutoProcessor, files, "processor")
            self.tokenizer = self._processor.tokenizer
        # What a decoder says follows the prompt. An encoder counts positions from the left.
        self.tokenizer.padding_side = "right" if config.is_encoder_decoder else "left"
        self._pool = WorkerPool(SERVICE, most=1) if template else None

    def asking(self, prompt: str) -> str:
        """The text of a prompt about one picture. Raises `ModelError`."""
        if self._pool is None:
            return prompt
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        return render(self._pool, self._template, {
            **self.tokenizer.special_tokens_map, "messages": [{"role": "user", "content": content}], "tools": None,
            "documents": None, "add_generation_prompt": True}, self._place)

    def alike(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of texts that may be asked together: all, if padding changes nothing, else equal ones. BLIP, for
        example, counts padding as positions."""
        groups: dict[str, list[int]] = {}
        for number, text in enumerate(texts):
            groups.setdefault("" if self._qwen else text, []).append(number)
        return list(groups.values())

    def inputs(self, pictures: Sequence[np.ndarray[Any, Any]], texts: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The arguments of `generate`, padded on the left; pictures are uint8 [H, W, 3]."""
        if self._qwen:
            return self._joined([self._processor(text=[text], images=[picture])
                                 for text, picture in zip(texts, pictures, strict=True)])
        words = {"text": list(texts), "padding": True} if any(texts) else {}
        read: Mapping[str, torch.Tensor] = self._processor(images=list(pictures), return_tensors="pt", **words)
        return {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}

    def _joined(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Inputs of one picture each, as a batch: texts are padded, and patches of all pictures follow each other."""
        length = max(part["input_ids"].shape[1] for part in parts)
        fill = {"input_ids": self.tokenizer.pad_token_id or 0}

        def padded(name: str, value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(value, (length - value.shape[1], 0), value=fill.get(name, 0))

        return {name: torch.cat([part[name] if name in ("pixel_values", "image_grid_thw") else padded(name, part[name])
                                 for part in parts]) for name in parts[0]}

    def texts(self, made_BL: torch.Tensor) -> list[str]:
        """The texts of token ids [B, L]."""
        texts: list[str] = self.tokenizer.batch_decode(made_BL, skip_special_tokens=True)
        return texts


class _StopIf(StoppingCriteria):
    """Stops all texts of a batch once an event is set."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


def _template_of(files: ComponentFiles) -> str:
    """The chat template beside a model; "" without one. Raises `ModelError`."""
    try:
        return read_regular(files.folder / TEMPLATE, TOKENIZER_BYTES).decode()
    except FileNotFoundError:
        found = [parse_config(files.small[name], files.folder / name).get("chat_template") for name in _TEMPLATES
                 if name in files.small]
        return next((text for text in found if isinstance(text, str)), "")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {files.folder / TEMPLATE} cannot be read: {error}",
                         hint="download the model again") from None


def _dtype_for(device: torch.device, files: ComponentFiles) -> torch.dtype:
    """bfloat16; on a CPU float32, unless the weights are stored as bfloat16; float16 where a GPU lacks it."""
    if device.type == "cpu":
        stored = {tensor.dtype for tensor in files.tensors.values()}
        return torch.bfloat16 if "BF16" in stored else torch.float32
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16


def _generation(max_tokens: int, temperature: float | None) -> dict[str, Any]:
    """The options of `generate`; without a temperature, the model's own."""
    sampling: dict[str, Any] = {} if temperature is None else {"do_sample": False, "temperature": None, "top_p": None,
                                                              "top_k": None}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature}
    return {"max_new_tokens": max_tokens, **sampling}
