"""Tiny models with random weights that describe pictures, saved as the Hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# As Qwen2.5-VL's own, without its system message: https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct.
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
            "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% endif %}")


def build_qwen(path: Path, kind: str = "qwen2_5_vl", template: str = TEMPLATE) -> Path:
    """Qwen2.5-VL, or Qwen3-VL with its head; the template in a file of its own."""
    import torch
    from tiny_pipelines import text_encoders, tokenizers

    torch.manual_seed(0)
    tokenizer = tokenizers.qwen25_vl()
    if kind == "qwen2_5_vl":
        model, processor = text_encoders.qwen25_vl(tokenizer, patch=14), tokenizers.qwen2_vl_processor(tokenizer)
    else:
        model, processor = text_encoders.qwen3_vl_with_head(tokenizer), tokenizers.qwen3_vl_processor(tokenizer)
    tokenizer.chat_template = None
    _lively(model)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    (path / "chat_template.jinja").write_text(template)
    return path


def build_blip(path: Path) -> Path:
    """BLIP for pictures of 32x32, with a tokenizer of letters."""
    import torch
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

    torch.manual_seed(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), *(f"##{chr(97 + each)}"
                                                                                       for each in range(26))]
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": len(words), "encoder_hidden_size": 16, "bos_token_id": 2, "eos_token_id": 3,
            "sep_token_id": 3, "pad_token_id": 0, "max_position_embeddings": 64}
    model = BlipForConditionalGeneration(BlipConfig(text_config=text, projection_dim=16, vision_config={
        **small, "image_size": 32, "patch_size": 8}))
    _lively(model)
    model.save_pretrained(path)
    tokenizer: Any = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(path)
    return path


def build_florence(path: Path) -> Path:
    """Florence-2 for pictures of 64x64: five tokens each. Its tokenizer has a token per byte."""
    import torch
    from tiny_pipelines.tokenizers import byte_letters
    from transformers import (
        BartTokenizer,
        CLIPImageProcessor,
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
    )

    torch.manual_seed(2)
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<image>", *byte_letters()]
    tokenizer: Any = BartTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[],
                                   pad_token="<pad>", extra_special_tokens={"image_token": "<image>"})
    text = {"model_type": "bart", "vocab_size": len(words), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
            "forced_eos_token_id": 2}
    vision = {"embed_dim": (8, 8, 8, 16), "num_heads": (1, 1, 1, 2), "num_groups": (1, 1, 1, 2), "depths": (1,) * 4,
              "window_size": 4, "projection_dim": 16}
    model = Florence2ForConditionalGeneration(Florence2Config(text_config=text, vision_config=vision,
                                                              image_token_id=words.index("<image>")))
    _lively(model)
    model.save_pretrained(path)
    pictures = CLIPImageProcessor(size={"height": 64, "width": 64}, do_center_crop=False, image_seq_length=5)
    Florence2Processor(pictures, tokenizer, num_additional_image_tokens=0).save_pretrained(path)
    return path


def _lively(model: Any) -> None:
    """Makes random weights large enough to say different things about different pictures."""
    import torch

    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.mul_(8)


def with_dates(path: Path) -> Path:
    """A model whose template writes the date into the text."""
    (path / "chat_template.jinja").write_text(TEMPLATE + "{{ strftime_now('%d') }}")
    return path


def templated_in(path: Path, name: str) -> Path:
    """The same model with its template in another file."""
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    found = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps({**found, "chat_template": template}))
    return path
