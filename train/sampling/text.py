"""Encodes prompts that are not cached, for `train sample --prompt` and the process beside a run; loads a text encoder.

The training loop never imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from prep.cache.ledger.ledger import ledger_at_hand
from prep.cache.records import RowRef
from prep.errors import ConfigError, ModelError
from prep.formatting import counted, printable_name
from prep.keys import unconditional_key
from prep.loader.index import Index
from prep.loader.rows import DTYPES
from prep.manifest.commands import prompts_command
from prep.manifest.consistency import is_shape_of
from prep.models.device.memory import memory_freed
from prep.models.families.registry import FAMILIES
from prep.models.family import TextArrays, options_of
from prep.models.files import Model
from prep.models.loading import quiet_libraries
from prep.models.text.encoder import TextEncoder
from prep.recipe.prompts import Prompt
from train.sampling.prompts import Encoded, PromptRows, most_references, references_of, texts_of


def encode_prompts(index: Index, model: Model, prompts: Sequence[Prompt],
                   device: torch.device) -> tuple[PromptRows, ...]:
    """`prompts` with their text rows: cached rows where they exist; the rest are encoded and not saved. References are
    relative to the working directory, and of those that are encoded.

    Rows are computed in float32 (T5 and language models: bfloat16) and cast to the cache's dtype. Raises `ModelError`,
    and `ConfigError` for references.
    """
    ledger = ledger_at_hand(index.cache)
    references = {prompt: _references(index, prompt) for prompt in prompts}
    texts = {prompt: texts_of(index, prompt, references[prompt], ledger) for prompt in prompts}
    wanted = {text.key: text for each in texts.values() for text in each}
    rows: dict[str, RowRef | TextArrays] = {key: ref for key in wanted if (ref := ledger.find(key))}
    rows[unconditional_key(index.manifest.fields["text"].context)] = index.unconditional()
    lacking = {key: text for key, text in wanted.items() if key not in rows}
    if any(text.seeing for text in lacking.values()):
        command = prompts_command(index.manifest, Path("FILE"))
        raise ConfigError(f"--prompt has references that the text encoder of family '{index.manifest.family}' sees, "
                          "expected one whose text is encoded with them",
                          hint=f"write the prompt into a file, and run {command}")
    if lacking:
        with memory_freed(device):
            encoded = encode_texts(index, model, [(text.words or "", text.negative) for text in lacking.values()],
                                   device)
        rows |= dict(zip(lacking, encoded, strict=True))
    return tuple(PromptRows(prompt=prompt.text, positive=rows[texts[prompt][0].key], settings=prompt.settings,
                            negative=rows[texts[prompt][1].key],
                            references=tuple(each.latent for each in references[prompt]),
                            inpaint_mask=next((each.inpaint_mask for each in references[prompt]), None))
                 for prompt in prompts)


def _references(index: Index, prompt: Prompt) -> tuple[Encoded, ...]:
    """The pictures that a prompt names. Raises `ConfigError` if there are too many, or one has no row."""
    count, most = len(prompt.references), most_references(index)
    if count > most:
        raise ConfigError(f"--prompt has {counted(count, 'reference')}, expected at most {most}, as family "
                          f"'{index.manifest.family}' takes", hint="omit --ref" if most == 0 else "omit some --ref")
    if index.inpaints and not count:
        raise ConfigError(f"--prompt names no picture, expected one of the data set to paint into, as family "
                          f"'{index.manifest.family}' does", hint="--ref PICTURE")
    found = references_of(index, prompt, Path())
    for name, row in zip(prompt.references, found, strict=True):
        if row is None:
            command = prompts_command(index.manifest, Path("FILE"))
            under = f" under the mask {printable_name(prompt.mask)}" if prompt.mask else ""
            raise ConfigError(f"--prompt names the reference {printable_name(name)}{under}, expected one that is "
                              "encoded: of a picture or prompt of the manifest",
                              hint=f"write the prompt into a file, and run {command}")
    return tuple(row for row in found if row is not None)


def encode_texts(index: Index, model: Model, texts: Sequence[tuple[str, bool]],
                 device: torch.device) -> list[TextArrays]:
    """Encodes texts, each with whether it is a negative prompt; a row for each, `[1, …]` by array.

    Raises `ModelError`.
    """
    field, family = index.manifest.fields["text"], FAMILIES[index.manifest.family]
    dtypes = {name: str(array["dtype"]) for name, array in field.arrays.items()}
    quiet_libraries()
    encoder = TextEncoder(model, family, options_of(field.context), device=str(device),
                          first=[([text], negative) for text, negative in texts],
                          compute=family.text_compute or "float32",
                          dtype=next(dtype for dtype in dtypes.values() if dtype != "uint8"))
    rows: list[TextArrays] = []
    for text, negative in texts:
        (arrays,) = encoder.encode([text], negative=negative)
        if arrays is None:
            raise ModelError(f"the text encoder of {model} returns values that are not finite for '{text[:80]}'")
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if not is_shape_of(index.manifest, "text", shapes, dict(index.text_shapes)):
            raise ModelError(f"the text encoder of {model} returns rows {shapes}, expected {dict(index.text_shapes)}, "
                             "as in the cache", hint="pass the model that encoded the cache: --model")
        row = {name: torch.from_numpy(array).view(DTYPES[dtypes[name]])[None] for name, array in arrays.items()}
        rows.append(row)
    return rows
