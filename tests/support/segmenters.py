"""Tiny segmentation models with random weights, saved as the Hub has them: config, safetensors, preprocessing."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = {0: "wall", 1: "person, individual", 2: "dog"}
CLASSES = {"id2label": NAMES, "label2id": {name: number for number, name in NAMES.items()}}


def build_clipseg(path: Path) -> Path:
    """A CLIPSeg for pictures of 32x32, with a tokenizer of letters."""
    import torch
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation, CLIPTokenizer, ViTImageProcessor

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    letters = [chr(97 + number) + end for number in range(26) for end in ("", "</w>")]
    words = [*letters, "<|startoftext|>", "<|endoftext|>"]
    path.mkdir(parents=True)
    (path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt")).save_pretrained(path)
    torch.manual_seed(0)
    text = {**small, "vocab_size": len(words), "max_position_embeddings": 16, "bos_token_id": len(words) - 2,
            "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    config = CLIPSegConfig(text_config=text, vision_config={**small, "image_size": 32, "patch_size": 8},
                           projection_dim=16, reduce_dim=16, extract_layers=[1, 2], decoder_num_attention_heads=2,
                           decoder_intermediate_size=16, conditional_layer=0)
    model = CLIPSegForImageSegmentation(config)
    for weights in model.decoder.parameters():
        torch.nn.init.normal_(weights, std=0.5)  # maps that are not the same everywhere
    model.save_pretrained(path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return path


def build_segformer(path: Path) -> Path:
    """A Segformer of three classes."""
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

    torch.manual_seed(1)
    config = SegformerConfig(num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], sr_ratios=[2, 1],
                             patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                             decoder_hidden_size=8, **CLASSES)
    model = SegformerForSemanticSegmentation(config)
    torch.nn.init.normal_(model.decode_head.classifier.weight, std=30)
    model.save_pretrained(path)
    SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    return path


def build_mask2former(path: Path) -> Path:
    """A Mask2Former of three classes and four queries; where SciPy is missing, its check has to be switched off."""
    import torch
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor
    from transformers import SwinConfig as Backbone

    torch.manual_seed(2)
    backbone = Backbone(image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
                        out_features=["stage1", "stage2", "stage3", "stage4"])
    config = Mask2FormerConfig(backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
                               encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2,
                               num_attention_heads=2, num_queries=4, **CLASSES)
    model = Mask2FormerForUniversalSegmentation(config)
    torch.nn.init.normal_(model.class_predictor.weight, std=1)
    model.save_pretrained(path)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(path)
    return path


def build_detr(path: Path) -> Path:
    """A DETR with masks, of three classes and four queries."""
    import torch
    from transformers import DetrConfig, DetrForSegmentation, DetrImageProcessor, ResNetConfig

    torch.manual_seed(3)
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                            out_features=["stage1", "stage2", "stage3", "stage4"])
    config = DetrConfig(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
                        backbone_config=backbone, d_model=32, num_queries=4, decoder_layers=1, encoder_layers=1,
                        decoder_attention_heads=8, encoder_attention_heads=8, decoder_ffn_dim=16, encoder_ffn_dim=16,
                        **CLASSES)
    DetrForSegmentation(config).save_pretrained(path)
    DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(path)
    return path
