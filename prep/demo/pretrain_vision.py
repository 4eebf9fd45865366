"""The demo's tiny CLIP, trained from scratch on drawn pictures and their captions: `python -m prep.demo.pretrain_vision
--out DIR`.

It knows all shapes, also what `LEFT_OUT` names, as a published model knows what a fine-tune is to teach; and it tells
pictures of one caption apart, by a second loss (Chen et al., SimCLR, 2020): two cuts of a picture are to be nearer to
each other than to other pictures. The shipped one took 15 minutes of one shared CPU core. Time bounds the steps, so no
two runs end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate, normalize
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from prep.demo.drawing import draw_picture
from prep.demo.optimize import Average, advance, learning_rate, progress
from prep.demo.pretrain_vae import SIZES
from prep.demo.vocabulary import COLORS, END, GROUNDS, MAX_TOKENS, SHAPES, START, caption, vocabulary, write_tokenizer

log = logging.getLogger(__name__)

SIDE = 64  # pixels of a picture as the model sees it
_BATCH = 96
_DRAWN = 12_288  # pictures, drawn once
_SHORT = 0.2  # fraction of captions that omit the ground
_TOKENS = 12  # of a caption, which has at most 9: what comes after its end changes nothing
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def main() -> None:
    """Trains and writes the model according to the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model to write")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    write(options.out, train(options.out, minutes=options.minutes, seed=options.seed))


def train(out: Path, *, minutes: float, seed: int) -> Any:
    """The trained model; its tokenizer's files are written to `out`."""
    torch.manual_seed(seed)
    rng = np.random.default_rng((seed, 3))
    model, tokenizer = CLIPModel(configured()), _Tokens(out)
    pixels_N3HW, labels = _drawn(rng)
    average = Average([model], decay=0.995)
    optimizer = torch.optim.AdamW(average.parameters, weight_decay=1e-2)
    for step, done in progress(minutes):
        chosen = rng.integers(len(labels), size=_BATCH)
        words = [caption(*labels[number]) for number in chosen]
        words = [each.partition(" on ")[0] if rng.random() < _SHORT else each for each in words]
        loss, right = _loss(model, pixels_N3HW[torch.from_numpy(chosen)], tokenizer(words), words, rng)
        advance(optimizer, loss, rate=learning_rate(1.5e-3, step, done))
        average.update()
        if step % 50 == 0:
            log.info("vision %3.0f %%, step %d, loss %.4f, right %.3f", 100 * done, step, loss.item(), right)
    average.swap()
    return model


def configured() -> CLIPConfig:
    """The config: both towers have few and narrow layers."""
    layers = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    words = vocabulary()
    return CLIPConfig(
        projection_dim=64, vision_config={**layers, "image_size": SIDE, "patch_size": 8},
        text_config={**layers, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
                     "vocab_size": len(words), "max_position_embeddings": MAX_TOKENS,
                     "bos_token_id": words.index(START), "eos_token_id": words.index(END),
                     "pad_token_id": words.index(END)})


def write(out: Path, model: Any) -> None:
    """Writes model and preprocessor, beside the tokenizer, as CLIP's are published; weights in half precision."""
    model.half().save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": SIDE},
        "resample": int(Image.Resampling.BICUBIC), "do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": MEAN, "image_std": STD,
    }, indent=1) + "\n", encoding="utf-8")


def _drawn(rng: np.random.Generator) -> tuple[Tensor, list[tuple[str, str, str]]]:
    """Pictures [N, 3, H, W] in -1..1 as the model sees them, of all shapes, and what each shows."""
    pixels, labels = [], []
    for _ in range(_DRAWN):
        color, shape, ground = (str(rng.choice(words)) for words in (COLORS, SHAPES, GROUNDS))
        width, height = SIZES[rng.integers(len(SIZES))]
        picture, _ = draw_picture(shape=shape, color=color, ground=ground, size=(width, height),
                                  seed=int(rng.integers(2**31)))
        ratio = SIDE / min(width, height)
        picture = picture.resize((round(width * ratio), round(height * ratio)), Image.Resampling.BICUBIC)
        left, top = ((side - SIDE) // 2 for side in picture.size)
        pixels.append(np.asarray(picture.crop((left, top, left + SIDE, top + SIDE))))
        labels.append((color, shape, ground))
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1, labels


class _Tokens:
    """Token ids of captions, each made once."""

    def __init__(self, out: Path) -> None:
        write_tokenizer(out)
        self._tokenizer, self._known = CLIPTokenizer.from_pretrained(out), dict[str, Tensor]()

    def __call__(self, words: list[str]) -> Tensor:
        for each in words:
            if each not in self._known:
                self._known[each] = self._tokenizer(each, padding="max_length", max_length=_TOKENS,
                                                    truncation=True, return_tensors="pt").input_ids[0]
        return torch.stack([self._known[each] for each in words])


def _loss(model: Any, pixels_B3HW: Tensor, tokens_BL: Tensor, words: list[str], rng: np.random.Generator
          ) -> tuple[Tensor, float]:
    """CLIP's loss, both ways, where equal captions are all right, and that of two cuts of each picture; and which share
    of pictures find their caption."""
    cuts = torch.cat([_cut(pixels_B3HW, rng), _cut(pixels_B3HW, rng)])
    images_BD, others_BD = normalize(model.get_image_features(pixel_values=cuts).pooler_output, dim=1).chunk(2)
    texts_BD = normalize(model.get_text_features(input_ids=tokens_BL).pooler_output, dim=1)
    scale, numbers_B = model.logit_scale.exp(), torch.arange(len(words))
    products_BB, own_BB = scale * images_BD @ texts_BD.T, scale * images_BD @ others_BD.T
    equal_BB = torch.tensor([[one == other for other in words] for one in words])
    target_BB = equal_BB / equal_BB.sum(1, keepdim=True)
    losses = [cross_entropy(each, target) for each, target in (
        (products_BB, target_BB), (products_BB.T, target_BB), (own_BB, numbers_B), (own_BB.T, numbers_B))]
    return torch.stack(losses).mean(), float(equal_BB[numbers_B, products_BB.argmax(1)].float().mean())


def _cut(pixels_B3HW: Tensor, rng: np.random.Generator) -> Tensor:
    """Pictures without some of their border, enlarged again, and a little brighter or darker."""
    left, top, right, bottom = rng.integers(0, 6, 4)
    inner = pixels_B3HW[..., top:SIDE - bottom, left:SIDE - right]
    return interpolate(inner, (SIDE, SIDE), mode="bilinear", antialias=True) * float(rng.uniform(0.9, 1.1))


if __name__ == "__main__":
    main()
