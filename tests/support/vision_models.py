"""Vision models of random weights: DINOv2, SigLIP and CLIP with their preprocessors, as the Hub has them; if asked for,
also with tokenizers of a token per character."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("dinov2", "siglip", "clip")
READING = ("siglip", "siglip2", "clip")  # SigLIP 2's have SigLIP's type, and Gemma's tokenizer
_TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
          "image_size": 32, "patch_size": 8}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_OF_TOKENIZERS = {"vocab_size": 520, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 1}


def build(folder: Path, kind: str, *, seed: int = 0, reads: bool = False) -> Path:
    """A model in `folder`, which is made; with a tokenizer if it `reads`."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(seed)
    text = _TEXT if not reads else {**_TEXT, **_OF_TOKENIZERS, **({"hidden_size": 64} if kind == "clip" else {})}
    if kind == "dinov2":
        model: Any = transformers.Dinov2Model(transformers.Dinov2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=32, patch_size=8))
        processor: Any = transformers.BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=32)
    elif kind.startswith("siglip"):
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=_TOWER))
        processor = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}, resample=2)
    else:
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=_TOWER,
                                                               projection_dim=24))
        processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    for value in model.parameters():  # larger than untrained ones, for which all pictures look alike
        torch.nn.init.normal_(value, std=1.0 if value.ndim > 1 else 0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if reads:
        {"siglip": _spiece, "siglip2": _gemma, "clip": _clip}[kind](folder)
    return folder


def _clip(folder: Path) -> None:
    from tiny_pipelines import tokenizers

    tokenizers.clip().save_pretrained(folder)


def _gemma(folder: Path) -> None:
    """As published: Gemma's class, no start, an end, padded on the right."""
    from tiny_pipelines import tokenizers

    tokenizer = tokenizers.gemma()
    tokenizer.add_bos_token, tokenizer.add_eos_token, tokenizer.padding_side = False, True, "right"
    tokenizer.update_post_processor()
    tokenizer.save_pretrained(folder)
    _published(folder, tokenizer_class="GemmaTokenizer", model_input_names=["input_ids"], padding_side="right",
               add_bos_token=False, add_eos_token=True)


def _spiece(folder: Path) -> None:
    import pytest

    sentencepiece = pytest.importorskip("sentencepiece", reason="SigLIP's tokenizer needs it")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog 0123456789"] * 8), model_writer=written,
        model_type="unigram", vocab_size=60, hard_vocab_limit=False, add_dummy_prefix=False, eos_id=1, unk_id=2,
        pad_id=0, bos_id=-1, minloglevel=2)
    (folder / "spiece.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text("{}")
    _published(folder, tokenizer_class="SiglipTokenizer", model_input_names=["input_ids"], model_max_length=64,
               do_lower_case=True, pad_token="</s>", eos_token="</s>", unk_token="<unk>")


def _published(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def teach(folder: Path, pictures: list[np.ndarray[Any, Any]], texts: list[str]) -> None:
    """Gives a CLIP, which reads, a projection of texts by which each has its picture's embedding: at most 64 texts."""
    import torch
    import transformers

    model = transformers.CLIPModel.from_pretrained(folder).eval()
    wanted, words = library_rows(folder, pictures), transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        read = torch.cat([model.text_model(**words(text, truncation=True, return_tensors="pt")).pooler_output
                          for text in texts])
        model.text_projection.weight.copy_(torch.linalg.lstsq(read, torch.from_numpy(wanted)).solution.T)
    model.save_pretrained(folder)


def library_texts(folder: Path, kind: str, texts: list[str]) -> np.ndarray[Any, Any]:
    """The embeddings of texts by the library alone, a processor and a model: float32 [N, D], of length 1."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    pictures: Any = transformers.CLIPImageProcessorPil() if kind == "clip" else transformers.SiglipImageProcessorPil()
    usual = transformers.CLIPProcessor if kind == "clip" else transformers.SiglipProcessor
    words: Any = (transformers.Siglip2Tokenizer if kind == "siglip2" else transformers.AutoTokenizer
                  ).from_pretrained(folder)
    processor = usual(image_processor=pictures, tokenizer=words)
    rows = []
    with torch.inference_mode():
        for text in texts:  # one by one: CLIP's needs no padding
            how = {"max_length": 77} if kind == "clip" else {"padding": "max_length", "max_length": 64}
            inputs = processor(text=[text], truncation=True, return_tensors="pt", **how)
            made = model.get_text_features(**inputs).pooler_output
            rows.append(torch.nn.functional.normalize(made, dim=1)[0].numpy())
    return np.stack(rows)


def library_rows(folder: Path, pictures: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The embeddings of pictures, uint8 [H, W, 3], by the library alone: float32 [N, D], of length 1."""
    import torch
    import transformers

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = {"dinov2": transformers.BitImageProcessorPil, "siglip": transformers.SiglipImageProcessorPil,
                 "clip": transformers.CLIPImageProcessorPil}[kind].from_pretrained(folder)
    rows = []
    with torch.inference_mode():
        for picture in pictures:
            inputs = processor(images=picture, input_data_format="channels_last", return_tensors="pt")
            made = (model(**inputs).last_hidden_state[:, 0] if kind == "dinov2" else
                    model.get_image_features(**inputs).pooler_output)
            rows.append(torch.nn.functional.normalize(made, dim=1)[0].numpy())
    return np.stack(rows)
