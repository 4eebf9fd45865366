"""FLUX.2's transformer: inputs, layers that get adapters, and klein's pipeline without a VAE."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import Flux2Pipeline

from prep.training.schema import Lora
from train.models.families import flux2
from train.models.family import Conditions
from train.models.targets import targeted


def test_patches_and_places_are_the_pipeline_s():
    latent = torch.randn(2, 32, 6, 8)
    assert torch.equal(flux2.patches(latent), Flux2Pipeline._patchify_latents(latent))
    hidden = torch.randn(1, 7, 3)
    assert torch.equal(flux2.places(hidden).long(), Flux2Pipeline._prepare_text_ids(hidden)[0])


def test_places_are_exact_in_bfloat16():
    assert flux2.places(torch.zeros(1, 512, 1, dtype=torch.bfloat16))[:, 3].tolist() == list(range(512))


def test_only_dev_is_told_a_guidance_scale():
    for build, guided in (("flux2", True), ("flux2_klein", False)):
        transformer = tiny_pipelines.build(build).transformer
        seen = []
        transformer.register_forward_pre_hook(lambda module, args, kwargs, seen=seen: seen.append(kwargs),
                                              with_kwargs=True)
        with torch.no_grad():
            flux2.predict(transformer, torch.randn(2, 32, 4, 4), torch.tensor([0.5, 0.7]),
                          Conditions(text={"hidden": torch.randn(2, 9, 96)}, sizes_B6=torch.zeros(2, 6)))
        assert (seen[0]["guidance"] is not None) == guided
        assert seen[0]["txt_ids"].shape == (2, 9, 4) and seen[0]["img_ids"].shape == (2, 4, 4)


@pytest.mark.parametrize(("targets", "left"), [("attention", {"linear_in", "linear_out"}), ("all-linear", set())])
def test_presets_name_every_layer_of_both_kinds_of_blocks(targets, left):
    transformer = tiny_pipelines.build("flux2").transformer
    layers = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = {name for name in layers if "transformer_blocks." in name}
    chosen = set(targeted(layers, Lora(targets=targets), flux2.PRESETS))
    assert chosen <= inside and {name.rpartition(".")[2] for name in inside - chosen} == left


def test_the_stand_in_for_a_vae_changes_no_latent():
    transformer = tiny_pipelines.build("flux2_klein").transformer.to(torch.bfloat16)
    vae = flux2.without_statistics(transformer)
    deviation = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    assert deviation.dtype == torch.float32 and torch.equal(deviation, torch.ones(128))
    assert torch.equal(vae.bn.running_mean, torch.zeros(128))
