"""Writes a diffusers directory as a single file with the names that Stable Diffusion 1 and XL were published with.

The opposite way of what diffusers' `from_single_file` converts, from the structure of the published checkpoints: blocks
of the UNet are counted through, attention of the VAE is a 1 × 1 convolution, OpenCLIP has one matrix for q, k and v.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
_RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
           "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
_ENDS = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
         "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
         "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
              "self_attn.out_proj": "attn.out_proj"}


def write_original(model: Path, path: Path) -> Path:
    """The weights of the pipeline directory `model` in one file at `path`, with the original names."""
    weights = {f"model.diffusion_model.{name}": value for name, value in _unet(model).items()}
    weights |= {f"first_stage_model.{name}": value for name, value in _vae(model).items()}
    first = {f"transformer.text_model.{name}": value for name, value in _clip(model / "text_encoder").items()}
    if not (model / "text_encoder_2").is_dir():
        weights |= {f"cond_stage_model.{name}": value for name, value in first.items()}
    else:
        weights |= {f"conditioner.embedders.0.{name}": value for name, value in first.items()}
        second = _open_clip(_clip(model / "text_encoder_2"))
        weights |= {f"conditioner.embedders.1.model.{name}": value for name, value in second.items()}
    save_file({name: value.contiguous() for name, value in weights.items()}, path)
    return path


def _read(folder: Path, stem: str) -> Weights:
    found: Weights = load_file(folder / f"{stem}.safetensors")
    return found


def _clip(folder: Path) -> Weights:
    return {name.removeprefix("text_model."): value for name, value in _read(folder, "model").items()}


def _unet(model: Path) -> Weights:
    config = json.loads((model / "unet" / "config.json").read_text())
    layers, blocks = config["layers_per_block"], len(config["block_out_channels"])
    found: Weights = {}
    for name, value in _read(model / "unet", "diffusion_pytorch_model").items():
        found[unet_name(name, layers, blocks, config)] = value
    return found


def unet_name(name: str, layers: int, blocks: int, config: dict[str, list[str]]) -> str:
    """The original name of a weight of a UNet of this config."""
    for ours, theirs in _ENDS.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    part = re.fullmatch(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+)\.(.+)", name)
    assert part is not None, name
    way, block, kind, number, rest = part[1], int(part[2] or 0), part[3], int(part[4]), part[5]
    if kind == "resnets":
        head = next(one for one in _RESNET if rest.startswith(f"{one}."))
        rest = _RESNET[head] + rest.removeprefix(head)
    if way is None:
        return f"middle_block.{1 if kind == 'attentions' else 2 * number}.{rest}"
    if kind == "downsamplers":
        return f"input_blocks.{(block + 1) * (layers + 1)}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        attended = "CrossAttn" in config["up_block_types"][block]
        return f"output_blocks.{block * (layers + 1) + layers}.{2 if attended else 1}.{rest}"
    place = int(kind == "attentions")
    if way == "down":
        return f"input_blocks.{block * (layers + 1) + number + 1}.{place}.{rest}"
    return f"output_blocks.{block * (layers + 1) + number}.{place}.{rest}"


def _vae(model: Path) -> Weights:
    levels = len(json.loads((model / "vae" / "config.json").read_text())["block_out_channels"])
    found: Weights = {}
    for name, value in _read(model / "vae", "diffusion_pytorch_model").items():
        new = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        new = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", new)
        new = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", new)
        new = re.sub(r"up_blocks\.(\d+)\.resnets", lambda at: f"up.{levels - 1 - int(at[1])}.block", new)
        new = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda at: f"up.{levels - 1 - int(at[1])}.upsample", new)
        new = re.sub(r"mid_block\.resnets\.(\d)", lambda at: f"mid.block_{int(at[1]) + 1}", new)
        if "mid_block.attentions.0." in new:
            head = next(one for one in _VAE_ATTENTION if f"attentions.0.{one}." in new)
            new = new.replace(f"mid_block.attentions.0.{head}", f"mid.attn_1.{_VAE_ATTENTION[head]}")
            value = value[..., None, None] if value.ndim == 2 else value
        found[new] = value
    return found


def _open_clip(weights: Weights) -> Weights:
    found: Weights = {}
    for name, value in weights.items():
        layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if name == "text_projection.weight":
            found["text_projection"] = value.T
        elif name == "embeddings.position_embedding.weight":
            found["positional_embedding"] = value
        elif name == "embeddings.token_embedding.weight":
            found["token_embedding.weight"] = value
        elif name.startswith("final_layer_norm."):
            found[name.replace("final_layer_norm", "ln_final")] = value
        elif layer is not None and layer[2] in _OPEN_CLIP:
            found[f"transformer.resblocks.{layer[1]}.{_OPEN_CLIP[layer[2]]}.{layer[3]}"] = value
    for name in [name for name in weights if ".self_attn.q_proj." in name]:
        kind = name.rpartition(".")[2]
        number = name.split(".")[2]
        parts = [weights[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
        found[f"transformer.resblocks.{number}.attn.in_proj_{kind}"] = torch.cat(parts)
    return found
