"""Tokenizers made in memory, a token per character or byte: no vocabulary is downloaded, none is read from a file.

They need transformers 5, whose tokenizers take a vocabulary as an argument.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers.processors import TemplateProcessing

_untyped: Any = transformers  # older releases lack some of the classes: they are looked up when a pipeline is built

PRINTABLE = tuple(chr(code) for code in range(33, 127))  # ASCII, without the space
WORD_MARK = "\u2581"  # what SentencePiece writes for a space

CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SEEING = (*CHAT, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
THINKING = (*CHAT, "<think>", "</think>")

# ChatML, as Qwen's own template writes plain messages; turned-off thinking is an empty thought, as in Qwen3's.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)
# Mistral's: a message's content is a list of parts, of which diffusers gives one, a text.
MISTRAL_TEMPLATE = (
    "{{ '<s>' }}"
    "{%- for message in messages -%}"
    "{%- set mark = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' -%}"
    "{{ '[' + mark + ']' + message['content'][0]['text'] + '[/' + mark + ']' }}"
    "{%- endfor -%}"
)


def byte_letters() -> list[str]:
    """The printable character for each byte, as in GPT-2 (openai/clip simple_tokenizer.py bytes_to_unicode)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + hidden.index(byte)) for byte in range(256)]


def clip(pad_token: str = "<|endoftext|>") -> Any:
    """CLIP's: two tokens per byte, one for the end of a word. Start and end have the two highest ids, as in CLIP's.

    OpenAI's CLIP pads with the end token, OpenCLIP (SD 2, the second of SDXL and SD3) with "!", whose id is 0.
    """
    letters = ["!", *(letter for letter in byte_letters() if letter != "!")]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return _untyped.CLIPTokenizer(vocab=_numbered(tokens), merges=[], pad_token=pad_token, model_max_length=77)


def open_clip() -> Any:
    """CLIP's tokenizer, padding as OpenCLIP does."""
    return clip(pad_token="!")


def t5() -> Any:
    """T5's: a unigram model of single characters; pad is 0, end 1, unknown 2. All beyond ASCII is unknown."""
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), (WORD_MARK, -2.0)]
    scored += [(letter, -3.0) for letter in PRINTABLE]
    return _untyped.T5Tokenizer(vocab=scored, extra_ids=0, model_max_length=512)


def chatglm() -> Any:
    """ChatGLM's: sentencepiece's model of single characters, and of bytes for others; 0 pads, on the left.

    As published, its config names the code of its authors.
    """
    sentencepiece = pytest.importorskip("sentencepiece", reason="ChatGLM's tokenizer needs it")
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["".join(PRINTABLE)]), model_writer=written, model_type="bpe", vocab_size=400,
        hard_vocab_limit=False, byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
        minloglevel=2)
    path = Path(tempfile.mkdtemp()) / "tokenizer.model"
    path.write_bytes(written.getvalue())
    made = ChatGLMTokenizer(str(path), auto_map={"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]})
    weakref.finalize(made, shutil.rmtree, path.parent)  # it is copied from there when it is saved
    return made


def qwen(special: Sequence[str] = CHAT, *, template: str = CHAT_TEMPLATE, pad_side: str = "right",
         end: str | None = None) -> Any:
    """A byte-level tokenizer whose `special` tokens are one id each; the first of them pads, `end` or the last ends."""
    tokenizer = _untyped.Qwen2Tokenizer(
        vocab=_numbered([*special, *byte_letters()]), merges=[], unk_token=special[0], pad_token=special[0],
        eos_token=end or special[-1], padding_side=pad_side, model_max_length=4096,
    )
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def qwen25_vl() -> Any:
    """Qwen2.5-VL's, with the marks around pictures."""
    return qwen(SEEING, end="<|im_end|>")


def qwen3_vl() -> Any:
    """Qwen3-VL's, whose template takes messages made of parts."""
    return qwen(SEEING, template=CHAT_TEMPLATE.replace("message['content']", "message['content'][0]['text']"),
                end="<|im_end|>")


def qwen2_vl_processor(tokenizer: Any) -> Any:
    """Qwen2-VL's processor; four tokens for a picture."""
    return _processor(_untyped.Qwen2VLProcessor, tokenizer, size={"shortest_edge": 28**2, "longest_edge": 64**2})


def qwen3_vl_processor(tokenizer: Any) -> Any:
    """Qwen3-VL's processor: a token for 32 x 32 pixels; small pictures are not enlarged."""
    return _processor(_untyped.Qwen3VLProcessor, tokenizer, size={"shortest_edge": 32**2, "longest_edge": 4096**2},
                      patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def _processor(kind: Any, tokenizer: Any, **options: Any) -> Any:
    """A processor without the part for videos, which needs torchvision."""
    made = object.__new__(kind)
    made.tokenizer, made.chat_template = tokenizer, tokenizer.chat_template
    made.image_processor = _untyped.Qwen2VLImageProcessorPil(**options)
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name if name.startswith('vision') else f'{name}_pad'}|>"
        setattr(made, f"{name}_token", token)
        setattr(made, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    made.save_pretrained = lambda folder, **_: [part.save_pretrained(folder) for part in (tokenizer,
                                                                                          made.image_processor)]
    return made


PROCESSORS: Mapping[str, Callable[[Any], Any]] = {"Qwen2VLProcessor": qwen2_vl_processor,
                                                  "Qwen3VLProcessor": qwen3_vl_processor}


def llama() -> Any:
    """Llama 3's, whose class has no name of its own; its pipelines pad with the token that ends a text."""
    usual = qwen(end="<|im_end|>")
    return _untyped.PreTrainedTokenizerFast(tokenizer_object=usual.backend_tokenizer, eos_token=usual.eos_token,
                                            model_max_length=4096, padding_side="right")


def qwen3() -> Any:
    """Qwen3's, with the marks around thoughts."""
    return qwen(THINKING, end="<|im_end|>")


def mistral() -> Any:
    """The tokenizer inside of Mistral 3's processor: pads on the left, its template takes messages made of parts."""
    special = ("<pad>", "<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
    made = qwen(special, template=MISTRAL_TEMPLATE, pad_side="left", end="</s>")
    return _untyped.TokenizersBackend(
        tokenizer_object=made.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        padding_side="left", model_max_length=4096, chat_template=MISTRAL_TEMPLATE)


def glm() -> Any:
    """GLM's: pads on the left, and starts every text with two tokens, so that an empty one is never of length 0."""
    start, end = ("[gMASK]", "<sop>"), "<|endoftext|>"
    made = qwen((end, *start, "<|user|>")).backend_tokenizer
    made.post_processor = TemplateProcessing(
        single=" ".join([*start, "$A"]), special_tokens=[(token, made.token_to_id(token)) for token in start])
    return _untyped.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=end, eos_token=end, padding_side="left",
                                            model_max_length=4096)


def gemma() -> Any:
    """Gemma's: characters, then bytes for all others; starts every text with <bos>, pads on the left."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", WORD_MARK]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = _untyped.GemmaTokenizer(
        vocab=_numbered([*tokens, *PRINTABLE, "\n"]), merges=[], model_max_length=8192
    )
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    return tokenizer


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
