"""Captions a second: `prep encode`'s text encoder against a plain loop over `encode_prompt`, one caption at a time.

    python tests/benchmarks/bench_text.py [--captions 64] [--rounds 5] [--threads 2]

The text encoder has the published shape of CLIP-L (SD 1.5), that of T5-XXL at a quarter of its width and depth (an
encoder of FLUX.1's, 512 tokens), or that of Qwen3-4B at a quarter of both (Z-Image's, up to 512 tokens, of which the
padding is masked), with random weights. No caption occurs twice, since counting a caption once is no
merit of the encoder. Both sides write what they made: ours a shard with checksums, the loop a file of torch.save a
caption.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_encode import timed
from results import emit, parser_of, table

from prep.arrays import ArraySpec
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.models.device.allocator import settled_heap
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.loading import quiet_libraries
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
import tiny_pipelines

TAKEN = 16  # captions that prep encode gives the text encoder at a time


def write_clip(root: Path) -> None:
    """SD 1.5 with a text encoder of CLIP-L's shape."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tiny_pipelines.save("sd15", root)
    shape = CLIPTextConfig.from_pretrained(root / "text_encoder")
    shape.update({"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                  "projection_dim": 768})
    CLIPTextModel(shape).save_pretrained(root / "text_encoder")


def write_t5(root: Path) -> None:
    """FLUX.1 with an encoder of T5-XXL's shape at a quarter of its width and depth."""
    from transformers import T5Config, T5EncoderModel

    tiny_pipelines.save("flux", root)
    shape = T5Config.from_pretrained(root / "text_encoder_2")
    shape.update({"d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 2560, "num_layers": 6})
    T5EncoderModel(shape).save_pretrained(root / "text_encoder_2")


def write_qwen(root: Path) -> None:
    """Z-Image with an encoder of Qwen3-4B's shape at a quarter of its width and depth."""
    from transformers import Qwen3Config, Qwen3Model

    tiny_pipelines.save("zimage", root)
    shape = Qwen3Config.from_pretrained(root / "text_encoder")
    shape.update({"hidden_size": 640, "intermediate_size": 2432, "num_hidden_layers": 9, "num_attention_heads": 8,
                  "num_key_value_heads": 2, "head_dim": 128, "layer_types": ["full_attention"] * 9})
    Qwen3Model(shape).save_pretrained(root / "text_encoder")


def captions_of(count: int) -> list[str]:
    text = "a red cat and two small dogs run along the wet street below some very old trees in autumn light"
    return [f"picture {number}: {text[:10 + 7 * number % 90]}" for number in range(count)]


def plain_loop(pipeline: Any, encode: Callable[[Any, str], Any], captions: list[str], root: Path) -> None:
    """What a caching script does: one caption after another through the pipeline's own method, a file for each."""
    for number, caption in enumerate(captions):
        with torch.inference_mode():
            torch.save(encode(pipeline, caption), root / f"{number}.pt")


def ours(encoder: TextEncoder, counter: LengthCounter | None, captions: list[str], root: Path) -> None:
    """What prep encode does with captions: a shard for each group of equal length, if rows are trimmed."""
    cache = open_cache(root, create=True)
    groups: dict[int | None, list[str]] = {}
    lengths = [None] * len(captions) if counter is None else counter.groups(captions)
    for caption, length in zip(captions, lengths, strict=True):
        groups.setdefault(length, []).append(caption)
    for tokens, some in groups.items():
        write_shard(cache, encoder, tokens, sorted(some, key=digest_json))


def write_shard(cache: Cache, encoder: TextEncoder, tokens: int | None, captions: list[str]) -> None:
    rows = (row for start in range(0, len(captions), TAKEN)
            for row in encoder.encode(captions[start:start + TAKEN], tokens))
    first = next(rows)
    assert first is not None
    specs = [ArraySpec(name=name, dtype="uint8" if array.dtype == np.uint8 else "bfloat16", shape=array.shape)
             for name, array in first.items()]
    with ShardWriter(cache, "text", specs) as writer:
        for caption, row in zip(captions, chain([first], rows), strict=True):
            assert row is not None
            writer.add(digest_json(caption), row)
        writer.finish()


MODELS: dict[str, tuple[str, Callable[[Path], None], Callable[[Any, str], Any], int]] = {
    "CLIP-L, 77 tokens": ("sd15", write_clip, lambda pipe, text: pipe.encode_prompt(text, "cpu", 1, False)[0], 77),
    "a quarter of T5-XXL, 512 tokens": (
        "flux", write_t5, lambda pipe, text: pipe.encode_prompt(text, None, max_sequence_length=512)[:2], 512),
    "a quarter of Qwen3-4B, to 512 tokens": (
        "zimage", write_qwen, lambda pipe, text: pipe.encode_prompt(text, "cpu", False, max_sequence_length=512)[0],
        512)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    options = parser.parse_args()
    if options.quick:
        options.captions, options.rounds = 16, 2
    quiet_libraries()
    torch.set_num_threads(options.threads)
    rows = []
    with settled_heap(torch.device("cpu")):
        for name in MODELS:
            rows += measured(name, options.captions, options.rounds)
    emit("prep encode's text encoder beside a plain loop",
         f"{options.captions} captions, none twice, {options.threads} threads, {options.rounds} rounds taking turns, "
         f"float32, {TAKEN} captions at a time and one.\n\n"
         + table(("", "captions/s", "CPU s a caption", "times as fast", "by CPU time"), rows), options.write)


def measured(name: str, count: int, rounds: int) -> list[tuple[str, ...]]:
    """The table's lines for a model."""
    family, write, encode, length = MODELS[name]
    captions = captions_of(count)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write(root / "model")
        facts, options = FAMILIES[family], TextOptions(max_length=length)
        encoder = TextEncoder(root / "model", facts, options, device="cpu", compute="float32", dtype="bfloat16")
        counter = LengthCounter(root / "model", facts, options) if facts.text.layout == "trimmed" else None
        with tiny_pipelines.known_warnings():
            pipeline = tiny_pipelines.load(root / "model")
        plain, taken = [], []
        for number in range(-1, rounds):  # the first is not counted
            some = captions if number >= 0 else captions[:TAKEN]
            (root / f"plain{number}").mkdir()
            plain.append(timed(partial(plain_loop, pipeline, encode, some, root / f"plain{number}")))
            taken.append(timed(partial(ours, encoder, counter, some, root / f"ours{number}")))
    ratios = [statistics.median(one[side] / two[side] for one, two in zip(plain[1:], taken[1:], strict=True))
              for side in (0, 1)]
    lines = []
    for title, times, told in (("one at a time", plain[1:], ("1", "1")),
                               ("prep encode", taken[1:], tuple(f"{ratio:.2f}" for ratio in ratios))):
        wall, cpu = (statistics.median(side) for side in zip(*times, strict=True))
        lines.append((f"{name}, {title}", f"{count / wall:.1f}", f"{cpu / count:.3f}", *told))
    return lines


if __name__ == "__main__":
    main()
