"""Trains a LoRA for Stable Diffusion 1.5 from a manifest: a loop of one's own, without a VAE or text encoder.

    python train_lora.py manifest.json MODEL lora.safetensors --steps 500

MODEL is the diffusers directory that encoded the manifest. Stopped, the same command continues from OUTPUT's state.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from prep import api

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("manifest")
parser.add_argument("model")
parser.add_argument("output", type=Path)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=4)
asked = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
unet = UNet2DConditionModel.from_pretrained(asked.model, subfolder="unet", low_cpu_mem_usage=False).to(device)
unet.requires_grad_(False)
torch.manual_seed(0)
unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
optimizer = torch.optim.AdamW([value for value in unet.parameters() if value.requires_grad], lr=1e-4)
schedule = DDPMScheduler.from_pretrained(asked.model, subfolder="scheduler")

stream = api.batches(asked.manifest, batch_size=asked.batch_size, steps=asked.steps)
state = asked.output.with_suffix(".state.json")
if state.exists():
    stream.load_state_dict(json.loads(state.read_text()))
    set_peft_model_state_dict(unet, load_file(asked.output))

for batch in stream:
    latents, noise, weights = (batch[name].to(device) for name in ("latents", "noise", "weights"))
    timesteps, text = batch["timesteps"].to(device), batch["text"]["hidden"].to(device, torch.float32)
    noised = schedule.add_noise(latents, noise, timesteps)
    predicted = unet(noised, timesteps, encoder_hidden_states=text, return_dict=False)[0]
    losses = (predicted - noise).square().mean(dim=(1, 2, 3))
    loss = (losses * weights).sum() / asked.batch_size
    loss.backward()
    if batch["last"]:  # of its step
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {batch['step'] + 1}  loss {losses.mean().item():.4f}", flush=True)
    if batch["last"] and (batch["step"] + 1) % 100 in (0, asked.steps % 100):
        save_file(get_peft_model_state_dict(unet), asked.output)
        state.write_text(json.dumps(stream.state_dict()))
