"""A script of the form of diffusers' examples/text_to_image/train_text_to_image_lora.py, for the test of the page that
changes it: the same statements in the same order where data, VAE and text are concerned, and little else.
"""

import argparse
import math
import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torchvision import transforms
from transformers import CLIPTextModel, CLIPTokenizer


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("pretrained_model_name_or_path", "train_data_dir", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--dataset_name")
    for name, default in (("resolution", 512), ("train_batch_size", 2), ("gradient_accumulation_steps", 1), ("rank", 4),
                          ("num_train_epochs", 100), ("max_train_steps", None), ("seed", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main():  # noqa: C901  # in one piece, as that script is
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    if args.seed is not None:
        set_seed(args.seed)
    noise_scheduler = DDPMScheduler.from_pretrained(args.pretrained_model_name_or_path, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(args.pretrained_model_name_or_path, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(args.pretrained_model_name_or_path, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(args.pretrained_model_name_or_path, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="unet", low_cpu_mem_usage=False
    )
    unet.requires_grad_(False)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    weight_dtype = torch.float32
    unet_lora_config = LoraConfig(r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian",
                                  target_modules=["to_k", "to_q", "to_v", "to_out.0"])
    unet.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    unet.add_adapter(unet_lora_config)
    lora_layers = [value for value in unet.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=1e-4)

    if args.dataset_name is not None:
        dataset = load_dataset(args.dataset_name)
    else:
        dataset = load_dataset("imagefolder", data_dir=args.train_data_dir)
    column_names = dataset["train"].column_names

    def tokenize_captions(examples):
        captions = [one if isinstance(one, str) else random.choice(one) for one in examples[column_names[1]]]
        return tokenizer(captions, max_length=tokenizer.model_max_length, padding="max_length", truncation=True,
                         return_tensors="pt").input_ids

    train_transforms = transforms.Compose([
        transforms.Resize(args.resolution), transforms.CenterCrop(args.resolution), transforms.ToTensor(),
        transforms.Normalize([0.5], [0.5])])

    def unwrap_model(model):
        return accelerator.unwrap_model(model)

    def preprocess_train(examples):
        examples["pixel_values"] = [train_transforms(image.convert("RGB")) for image in examples[column_names[0]]]
        examples["input_ids"] = tokenize_captions(examples)
        return examples

    with accelerator.main_process_first():
        train_dataset = dataset["train"].with_transform(preprocess_train)

    def collate_fn(examples):
        return {name: torch.stack([example[name] for example in examples]) for name in ("pixel_values", "input_ids")}

    train_dataloader = torch.utils.data.DataLoader(
        train_dataset, shuffle=True, collate_fn=collate_fn, batch_size=args.train_batch_size
    )

    if args.max_train_steps is None:
        len_train_dataloader_after_sharding = math.ceil(len(train_dataloader) / accelerator.num_processes)
        num_update_steps_per_epoch = math.ceil(len_train_dataloader_after_sharding / args.gradient_accumulation_steps)
        num_training_steps_for_scheduler = args.num_train_epochs * num_update_steps_per_epoch
    else:
        num_training_steps_for_scheduler = args.max_train_steps * accelerator.num_processes
    lr_scheduler = get_scheduler("constant", optimizer=optimizer, num_training_steps=num_training_steps_for_scheduler)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    print(f"Num examples = {len(train_dataset)}")
    global_step = 0

    for _epoch in range(args.num_train_epochs):
        unet.train()
        for batch in train_dataloader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"].to(dtype=weight_dtype)).latent_dist.sample()
                latents = latents * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                bsz = latents.shape[0]
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps.long())
                encoder_hidden_states = text_encoder(batch["input_ids"], return_dict=False)[0]
                model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
                loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                print(f"step {global_step}  loss {loss.detach().item():.4f}  batch {bsz}", flush=True)
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unet_lora_state_dict = get_peft_model_state_dict(unwrap_model(unet))
        StableDiffusionPipeline.save_lora_weights(save_directory=args.output_dir, unet_lora_layers=unet_lora_state_dict)
    accelerator.end_training()


if __name__ == "__main__":
    main()
