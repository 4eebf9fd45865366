"""Trains a LoRA for Stable Diffusion 1.5 with Lightning, from a manifest.

    python train_lora_lightning.py manifest.json MODEL OUTPUT --steps 500

OUTPUT is a directory; the LoRA is in it at the end. Stopped, the same command continues from the last checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model_state_dict
from torch.utils.data import DataLoader

from prep import api


class LoRA(lightning.LightningModule):
    def __init__(self, manifest: str, model: str, steps: int, batch_size: int) -> None:
        super().__init__()
        self.asked = {"manifest": manifest, "steps": steps, "batch_size": batch_size}
        self.unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet", low_cpu_mem_usage=False)
        self.unet.requires_grad_(False)
        self.unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        self.schedule = DDPMScheduler.from_pretrained(model, subfolder="scheduler")
        self.stream_state: dict[str, Any] | None = None

    def train_dataloader(self) -> DataLoader:
        # Here and not before: by now the processes know each other, and the stream is divided among them.
        self.stream = api.batches(**self.asked)
        if self.stream_state is not None:
            self.stream.load_state_dict(self.stream_state)
        return DataLoader(self.stream, batch_size=None)

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        noised = self.schedule.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
        text = batch["text"]["hidden"].to(torch.float32)
        predicted = self.unet(noised, batch["timesteps"], encoder_hidden_states=text, return_dict=False)[0]
        losses = (predicted - batch["noise"]).square().mean(dim=(1, 2, 3))
        # Lightning reads a batch ahead, so the stream itself is further by now.
        self.stream_state = {**self.stream.state_dict(), "step": batch["step"] + 1}
        # Gradients are averaged over processes, so each gives its part of the sum that many times.
        loss = (losses * batch["weights"]).sum() / self.asked["batch_size"] * self.trainer.world_size
        self.print(f"step {batch['step'] + 1}  loss {loss.item() / self.trainer.world_size:.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=1e-4)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stream"] = self.stream_state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.stream_state = checkpoint["stream"]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("manifest")
parser.add_argument("model")
parser.add_argument("output", type=Path)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=4, help="of a step, over all processes")
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
asked = parser.parse_args()

lightning.seed_everything(0)
module = LoRA(asked.manifest, asked.model, asked.steps, asked.batch_size)
keeping = ModelCheckpoint(asked.output, filename="last", every_n_train_steps=asked.every, enable_version_counter=False)
trainer = lightning.Trainer(max_steps=asked.steps, callbacks=[keeping], logger=False, enable_progress_bar=False,
                            enable_model_summary=False, use_distributed_sampler=False, default_root_dir=asked.output)
last = asked.output / "last.ckpt"
trainer.fit(module, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    StableDiffusionPipeline.save_lora_weights(asked.output, unet_lora_layers=get_peft_model_state_dict(module.unet))
