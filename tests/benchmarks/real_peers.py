"""What bench_real's commands do, by code of diffusers, transformers and peft; each call is a process of its own.

    python tests/benchmarks/real_peers.py encode|run|sample|merge SIDE [NAME=VALUE]

In the current directory are `model`, `photos`, and for a loop or a picture `manifest.json` and `run`, as bench_real has
made them. What denoiser and text encoders are given, in `run` and `encode`, is made by our code for the family.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from PIL import Image

from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.models.configs import pipeline_index
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.loading import quiet_libraries
from prep.models.pipeline import infer_family
from train.check import check
from train.config.load import parse
from train.models.denoiser import with_noise
from train.objectives.forward import forward
from train.setup import RunRequest

MODEL, DTYPE, CPU = Path("model"), torch.bfloat16, torch.device("cpu")
PROMPT = "a picture of the first kind"
_untyped: Any = diffusers  # its classes have no type annotations


def main() -> None:
    """Does what the command line says."""
    what, side, settings = sys.argv[1], int(sys.argv[2]), dict(each.split("=") for each in sys.argv[3:])
    quiet_libraries()
    if what == "encode":
        encode(side)
    elif what == "run":
        run(settings)
    elif what == "sample":
        made = with_lora()
        made.set_progress_bar_config(disable=True)
        made(PROMPT, num_inference_steps=2, width=side, height=side).images[0].save("peer.png")
    else:
        made = with_lora()
        made.fuse_lora()
        made.unload_lora_weights()
        made.save_pretrained("fused")


def encode(side: int) -> None:
    """Latents and text of the pictures, one picture at a time."""
    family = FAMILIES[infer_family(MODEL)]
    made, options = pipeline(**{family.denoiser: None}), TextOptions(max_length=family.text.max_length)
    with torch.inference_mode():
        captions = [path.read_text() for path in sorted(Path("photos").glob("*.txt"))]
        family.text.encode(made, captions, options, CPU)
        family.text.unconditional(made, options, CPU)
        for path in sorted(Path("photos").glob("*.jpg")):
            pixels = np.array(Image.open(path).convert("RGB").resize((side, side), Image.Resampling.LANCZOS))
            image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2).to(DTYPE).div_(127.5).sub_(1)
            made.vae.encode(image)


def run(settings: dict[str, str]) -> None:
    """Two steps of a LoRA of peft on the rows of the cache."""
    family, given = FAMILIES[infer_family(MODEL)], {}
    if settings.get("quantization") == "nf4":
        given["quantization_config"] = _untyped.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)
    config = parse({"steps": 2, "batch_size": 1, "precision": "bf16"}, "")
    setup = check(RunRequest(manifest=Path("manifest.json")), config).setup
    assert setup is not None
    kind = getattr(diffusers, pipeline_index(MODEL)[family.denoiser][1])
    model = kind.from_pretrained(MODEL / family.denoiser, variant=variant(), torch_dtype=DTYPE, **given)
    model.requires_grad_(False)
    targets = family.lora.presets[str(config.lora.targets)]
    model.add_adapter(LoraConfig(r=config.lora.rank, lora_alpha=config.lora.rank, target_modules=list(targets)))
    cast_training_params(model, dtype=torch.float32)
    if settings.get("gradient_checkpointing") == "true":
        model.enable_gradient_checkpointing()
    model.train()
    denoiser = with_noise(model, MODEL, family, config, setup.prediction, CPU, DTYPE)
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer, latents = torch.optim.AdamW(parameters, lr=1e-4), latents_of(setup.manifest)
    asked = draws.training(setup.index, setup.plan, 0, 2, timesteps=denoiser.timesteps)
    with batches(Rows(setup.index), asked, masked=False, pinned=False) as feed:
        for batch in feed:
            made = forward(denoiser, batch, latents, config.loss)
            loss = torch.nn.functional.mse_loss(made.predicted_BChw.float(), made.target_BChw.float())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()


def with_lora() -> Any:
    """The whole pipeline with the LoRA of our run."""
    made = pipeline()
    made.load_lora_weights("run", weight_name="lora.safetensors")
    return made


def pipeline(**parts: Any) -> Any:
    """The pipeline, but for `parts` that are `None`."""
    return _untyped.DiffusionPipeline.from_pretrained(MODEL, variant=variant(), torch_dtype=DTYPE, **parts)


def variant() -> str | None:
    """Of the files of weights."""
    return "fp16" if list((MODEL / "vae").glob("*.fp16.*")) else None


if __name__ == "__main__":
    main()
