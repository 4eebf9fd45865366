"""The demo's tiny model, trained from scratch on drawn pictures: `python -m prep.demo.pretrain --out DIR`.

First the VAE, then UNet and text encoder together on its latents; every shape but the left-out one is drawn. The
shipped model took 17 and 37 minutes of one shared CPU core, in three runs that each continued the last (`--start`).
Time bounds the steps, so no two runs end with the same weights.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import CLIPTokenizer

from prep.demo.optimize import Average, advance, learning_rate, progress
from prep.demo.pretrain_vae import SIZES, Labels, draw_batch, encode, train_vae
from prep.demo.tiny_model import TINY, Networks, load_parts, make_parts, scheduler, write_pipeline
from prep.demo.vocabulary import MAX_TOKENS, caption, write_tokenizer

log = logging.getLogger(__name__)

_BATCH = 64
_PER_SIZE = 3072  # pictures drawn and encoded for each bucket size
_UNCONDITIONAL = 0.1  # fraction of captions that are emptied, so that guidance works
_SHORT = 0.1  # fraction of captions that omit the ground


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Scaled latents of many pictures of one size, and what each shows."""

    latents_BChw: Tensor
    labels: list[Labels]


def main() -> None:
    """Trains and writes one pipeline according to the options."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    parts = load_parts(options.start) if options.start else make_parts(TINY, seed=options.seed)
    if options.vae_minutes:
        train_vae(parts.vae, minutes=options.vae_minutes, seed=options.seed)
    rng = np.random.default_rng((options.seed, 2))
    data = [encode_drawn(parts.vae, size, rng) for size in SIZES]
    train_unet(parts, data, tokenizer=load_tokenizer(options.out), minutes=options.minutes, rng=rng)
    write_pipeline(options.out, parts, dtype=torch.float16)


def encode_drawn(vae: Any, size: tuple[int, int], rng: np.random.Generator) -> Encoded:
    """Scaled latents of freshly drawn pictures of `size`."""
    batches = [draw_batch(_BATCH, size, rng) for _ in range(_PER_SIZE // _BATCH)]
    latents_BChw = torch.cat([encode(vae, pictures) for pictures, _ in batches]) * vae.config.scaling_factor
    return Encoded(latents_BChw=latents_BChw, labels=[label for _, labels in batches for label in labels])


def train_unet(parts: Networks, data: list[Encoded], *, tokenizer: Any, minutes: float,
               rng: np.random.Generator) -> None:
    """Trains UNet and text encoder in place; they end with the average of their weights."""
    torch.manual_seed(int(rng.integers(2**31)))
    average, recent = Average([parts.unet, parts.text], decay=0.999), 1.0
    optimizer = torch.optim.AdamW(average.parameters, weight_decay=1e-3)
    for step, done in progress(minutes):
        loss = _unet_loss(parts, data[rng.integers(len(data))], tokenizer, rng)
        advance(optimizer, loss, rate=learning_rate(1.5e-3, step, done))
        average.update()
        recent += 0.01 * (loss.item() - recent)
        if step % 100 == 0:
            log.info("unet %3.0f %%, step %d, loss %.4f", 100 * done, step, recent)
    average.swap()


def _unet_loss(parts: Networks, data: Encoded, tokenizer: Any, rng: np.random.Generator) -> Tensor:
    """The noise-prediction error on a random batch, at uniformly random timesteps."""
    chosen = rng.integers(len(data.labels), size=_BATCH)
    latents_BChw = data.latents_BChw[torch.from_numpy(chosen)]
    noise_BChw, timesteps_B = torch.randn_like(latents_BChw), torch.randint(1000, (_BATCH,))
    noisy_BChw = scheduler().add_noise(latents_BChw, noise_BChw, timesteps_B)
    hidden_BLD = _hidden(parts.text, tokenizer, [words_of(data.labels[index], rng) for index in chosen])
    return mse_loss(parts.unet(noisy_BChw, timesteps_B, hidden_BLD).sample, noise_BChw)


def _hidden(text: Any, tokenizer: Any, captions: list[str]) -> Tensor:
    """The text encoder's last states [B, L, D]; equal captions are encoded once."""
    distinct = sorted(set(captions))
    tokens_BL = tokenizer(distinct, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    hidden: Tensor = text(tokens_BL.input_ids).last_hidden_state
    return hidden[torch.tensor([distinct.index(each) for each in captions])]


def words_of(label: Labels, rng: np.random.Generator) -> str:
    """The caption of a picture; sometimes without its ground, sometimes empty."""
    draw, whole = rng.random(), caption(*label)
    if draw < _UNCONDITIONAL:
        return ""
    return whole.partition(" on ")[0] if draw < _UNCONDITIONAL + _SHORT else whole


def load_tokenizer(out: Path) -> Any:
    """The demo's tokenizer; writes its files below `out`."""
    write_tokenizer(out / "tokenizer")
    return CLIPTokenizer.from_pretrained(out / "tokenizer")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the pipeline to write")
    parser.add_argument("--start", type=Path, help="pipeline to go on from; default: random weights")
    parser.add_argument("--vae-minutes", type=float, default=17)
    parser.add_argument("--minutes", type=float, default=37, help="for UNet and text encoder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
