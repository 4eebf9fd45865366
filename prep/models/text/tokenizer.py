"""Loads tokenizers; their texts are tried first where a tokenizer's own file decides how they are split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers

from prep.errors import ModelError, first_line, is_panic
from prep.models.checkpoints.classes import imported
from prep.models.checkpoints.staging import staged
from prep.models.files import FETCH_AGAIN, VOCABULARY, ComponentFiles, Model
from prep.models.loading import said
from prep.models.text.trial import NAME, Trial, strings_in, try_first


@contextmanager
def without_panics(model: Model) -> Iterator[None]:
    """Raises a `ModelError` where a library in Rust panics, as tokenizers does: that is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(f"the tokenizer of {model} stopped at a text: {first_line(error)}", hint=FETCH_AGAIN) from None


MOST_ADDED = 1000  # tokens of its own, to each text
# Of components that are a pipeline's only tokenizer: the class of the one inside.
PROCESSORS: Mapping[str, str] = {"AutoProcessor": "AutoTokenizer", "PixtralProcessor": "AutoTokenizer",
                                "Qwen3VLProcessor": "Qwen2Tokenizer"}
# Classes whose vocabulary sentencepiece reads in this process, and its file, unless that is `VOCABULARY`.
SENTENCEPIECE: Mapping[str, str] = {"SiglipTokenizer": "spiece.model"}


def load_tokenizer(class_name: str, files: ComponentFiles) -> Any:
    """Loads the tokenizer of `files` as the class `class_name` of their library, by default transformers.

    For a processor, which would also prepare pictures and need torchvision, it loads the tokenizer inside, as the
    processor itself does; text has the same tokens, each time. Raises `ModelError`.
    """
    kind = imported((files.kind[0] or "transformers", PROCESSORS.get(class_name, class_name)))
    try:
        vocabulary = SENTENCEPIECE.get(class_name, VOCABULARY)
        trial = Trial(files, vocabulary) if vocabulary in files.small or _needs_trial(kind, files) else None
        if trial is not None:
            trial.ask(["", *strings_in(files.config)])  # tokens are normalized while it is loaded
        with staged(files) as folder, without_panics(files.folder):
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _without_chance(tokenizer)
        if trial is not None:
            try_first(tokenizer, trial)
        if class_name in PROCESSORS and tokenizer.chat_template is None:
            tokenizer.chat_template = json.loads(files.small.get("chat_template.json", b"{}")).get("chat_template")
        if not tokenizer.model_max_length >= 2:
            raise ValueError(f"model_max_length is {tokenizer.model_max_length}")
        if (added := tokenizer.num_special_tokens_to_add()) > MOST_ADDED:
            raise ValueError(f"it adds {added} tokens to each text, expected at most {MOST_ADDED}")
        with without_panics(files.folder):
            tokenizer(["a"], truncation=True)  # some faulty configs fail only here
        return tokenizer
    except ModelError:
        raise
    except Exception as error:  # broken files make the libraries raise almost anything
        raise ModelError(f"cannot load the tokenizer in {files.folder}: {said(error, files)}",
                         hint="download the model again, or save its tokenizer with transformers: "
                         "tokenizer.save_pretrained(DIR)") from None


def _without_chance(tokenizer: Any) -> None:
    """Switches off BPE-dropout (Provilkov et al. 2020), which is for training a text encoder: a text would get other
    tokens each time, but has one row in a cache."""
    if tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "dropout", None) is not None:
        tokenizer.backend_tokenizer.model.dropout = None


def _needs_trial(kind: type[Any], files: ComponentFiles) -> bool:
    """Whether a tokenizer of class `kind` treats texts as its file says."""
    fast = transformers.PreTrainedTokenizerFast
    plain = kind is fast or not issubclass(kind, fast)
    data = files.small.get(NAME, b"")
    return bool(data) and (plain or "__init__" not in vars(kind) or b"recompiled" in data)  # a table of replacements
