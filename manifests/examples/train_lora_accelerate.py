"""Trains a LoRA for Stable Diffusion 1.5 with accelerate, as diffusers' example scripts do, from a manifest.

    accelerate launch train_lora_accelerate.py manifest.json MODEL OUTPUT --steps 500

Of such a script only the data changes: no dataset, VAE, tokenizer or text encoder is loaded. OUTPUT is a directory; the
LoRA is in it at the end. Stopped, the same command continues from the last checkpoint, with any number of processes, to
the steps of a run that was never stopped.
"""

import argparse
from pathlib import Path
from shutil import rmtree

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict

from prep import api

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("manifest")
parser.add_argument("model")
parser.add_argument("output", type=Path)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=4, help="of a step, over all processes")
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
asked = parser.parse_args()

accelerator = Accelerator()  # first: it makes the process group, by which the stream knows this process's part
set_seed(0)
unet = UNet2DConditionModel.from_pretrained(asked.model, subfolder="unet", low_cpu_mem_usage=False)
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
cast_training_params(unet, dtype=torch.float32)
optimizer = torch.optim.AdamW([value for value in unet.parameters() if value.requires_grad], lr=1e-4)
schedule = DDPMScheduler.from_pretrained(asked.model, subfolder="scheduler")

stream = api.batches(asked.manifest, batch_size=asked.batch_size, steps=asked.steps)
unet, optimizer = accelerator.prepare(unet, optimizer)  # not the stream: it is divided among processes already
accelerator.register_for_checkpointing(stream)
checkpoint = asked.output / "checkpoint"
if checkpoint.exists():
    accelerator.load_state(str(checkpoint))

for batch in stream:
    latents, noise, weights = (batch[name].to(accelerator.device) for name in ("latents", "noise", "weights"))
    timesteps, text = batch["timesteps"].to(accelerator.device), batch["text"]["hidden"].to(accelerator.device)
    noised = schedule.add_noise(latents, noise, timesteps)
    predicted = unet(noised, timesteps, encoder_hidden_states=text.to(torch.float32), return_dict=False)[0]
    losses = (predicted - noise).square().mean(dim=(1, 2, 3))
    # Gradients are averaged over processes, so each gives its part of the sum that many times.
    loss = (losses * weights).sum() / asked.batch_size * accelerator.num_processes
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    done = batch["step"] + 1
    shown = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"step {done}  loss {shown:.4f}", flush=True)
    if done % asked.every == 0 and done < asked.steps:
        accelerator.save_state(str(asked.output / "unfinished"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:  # a stop while it is written costs nothing
            rmtree(checkpoint, ignore_errors=True)
            (asked.output / "unfinished").rename(checkpoint)

if accelerator.is_main_process:
    weights = get_peft_model_state_dict(accelerator.unwrap_model(unet))
    StableDiffusionPipeline.save_lora_weights(asked.output, unet_lora_layers=weights)
accelerator.end_training()
