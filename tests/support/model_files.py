"""Pipeline directories whose every byte is written here, and the hostile ones that are made of a tiny model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

INDEX = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
         "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
         "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), newline="\n")


def change_json(path: Path, **changes: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def write_safetensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """float32 tensors that count up from 0, one after the other."""
    header, data = {}, b""
    for name, shape in shapes.items():
        count = 1
        for side in shape:
            count *= side
        begin, data = len(data), data + struct.pack(f"<{count}f", *range(count))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data)]}
    spelled = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(spelled)) + spelled + data)


def write_model(root: Path, *, parts: bool = False) -> Path:
    """A directory as an ordinary Stable Diffusion 1.5 pipeline is, but that nothing could run; the same bytes always.

    `parts`: the VAE's weights are in two files with an index.
    """
    write_json(root / "model_index.json", INDEX)
    write_json(root / "vae" / "config.json", {"_class_name": "AutoencoderKL", "_diffusers_version": "0.6.0",
                                              "block_out_channels": [8, 16], "scaling_factor": 0.18215, "zero": 1e-05})
    stem = root / "vae" / "diffusion_pytorch_model"
    if parts:
        names = [f"{stem.name}-0000{number}-of-00002.safetensors" for number in (1, 2)]
        write_safetensors(stem.with_name(names[0]), {"a": [4, 2]})
        write_safetensors(stem.with_name(names[1]), {"b": [3]})
        write_json(stem.with_suffix(".safetensors.index.json"), {"weight_map": {"a": names[0], "b": names[1]}})
    else:
        write_safetensors(stem.with_suffix(".safetensors"), {"a": [4, 2], "b": [3]})
    write_json(root / "text_encoder" / "config.json", {"hidden_size": 6, "vocab_size": 9, "torch_dtype": "float32",
                                                       "transformers_version": "4.22.0.dev0", "name": "ü \u2028"})
    write_safetensors(root / "text_encoder" / "model.safetensors", {"embedding": [9, 6]})
    write_json(root / "tokenizer" / "tokenizer_config.json", {"model_max_length": 77, "name_or_path": "openai/clip",
                                                              "special_tokens_map_file": "./special_tokens_map.json"})
    write_json(root / "tokenizer" / "vocab.json", {"a": 0, "b": 1})
    write_json(root / "tokenizer" / "special_tokens_map.json", {"bos_token": "a"})
    (root / "tokenizer" / "merges.txt").write_text("#version: 0.2\na b\n", newline="\n")
    return root
