"""FLUX.2's text rows, and the tokenizer inside dev's processor.

FLUX.2's transformer: inputs, layers that get adapters, and klein's pipeline without a VAE.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import Flux2Pipeline

from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families import flux2
from prep.models.families.flux2 import DEV, DEV_LAYERS, KLEIN, KLEIN_LAYERS, SYSTEM
from prep.models.family import Conditions, TextOptions
from prep.models.text.encoder import TextEncoder
from prep.models.text.truncation import TruncationFinder
from prep.training.schema import Lora
from train.models.targets import targeted

OPTIONS = TextOptions(max_length=512)


@pytest.fixture(scope="module")
def dev(tmp_path_factory) -> Path:
    return tiny_pipelines.save("flux2", tmp_path_factory.mktemp("flux2") / "model")


def row_of(model: Path, caption: str = "a cat") -> torch.Tensor:
    encoder = TextEncoder(model, DEV, OPTIONS, device="cpu", compute="float32", dtype="float32")
    return torch.from_numpy(encoder.encode([caption])[0]["hidden"])


@pytest.mark.parametrize(("build", "family", "layers"), [("flux2", DEV, DEV_LAYERS),
                                                         ("flux2_klein", KLEIN, KLEIN_LAYERS)])
def test_layers_and_length_are_the_pipeline_s(build, family, layers, tmp_path):
    pipeline = tiny_pipelines.build(build)
    for method in (pipeline.__call__, pipeline.encode_prompt):
        defaults = {name: one.default for name, one in inspect.signature(method).parameters.items()}
        assert defaults["text_encoder_out_layers"] == layers
        assert defaults["max_sequence_length"] == family.text.max_length
    shapes = family.text.shapes(Configs(tiny_pipelines.save(build, tmp_path / "model")), OPTIONS)
    assert shapes == {"hidden": (512, 96)}
    assert family.text.constants["layers"] == ",".join(str(number) for number in layers)


def test_the_message_to_the_system_is_the_pipeline_s():
    assert tiny_pipelines.build("flux2").system_message == SYSTEM == DEV.text.constants["system"]


def as_processor(model: Path, root: Path, **tokenizer: Any) -> Path:
    """A copy of the model whose index names the processor, as published."""
    (root / "tokenizer").mkdir(parents=True)
    for path in model.iterdir():
        if path.name not in ("model_index.json", "tokenizer"):
            (root / path.name).symlink_to(path)
    index = json.loads((model / "model_index.json").read_text())
    (root / "model_index.json").write_text(json.dumps({**index, "tokenizer": ["transformers", "PixtralProcessor"]}))
    for path in (model / "tokenizer").iterdir():
        (root / "tokenizer" / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "tokenizer" / "tokenizer_config.json").read_text())
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({
        **config, "tokenizer_class": "LlamaTokenizerFast", "processor_class": "PixtralProcessor", **tokenizer}))
    return root


def test_of_a_processor_the_tokenizer_is_loaded(dev, tmp_path):
    """It needs torchvision, which is not installed here, only for pictures."""
    assert torch.equal(row_of(as_processor(dev, tmp_path / "model")), row_of(dev))


@pytest.mark.slow
def test_a_processor_s_template_may_be_in_a_file_of_its_own(dev, tmp_path):
    model = as_processor(dev, tmp_path / "model")
    template = (model / "tokenizer" / "chat_template.jinja").read_text()
    (model / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"cannot encode a caption: .*chat_template"):
        row_of(model)
    (model / "tokenizer" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert torch.equal(row_of(model), row_of(dev))


@pytest.mark.parametrize("content", ["[", "[]"])
def test_a_template_file_that_is_damaged(dev, tmp_path, content):
    model = as_processor(dev, tmp_path / "model")
    (model / "tokenizer" / "chat_template.jinja").unlink()
    (model / "tokenizer" / "chat_template.json").write_text(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer in"):
        row_of(model)


def test_a_tokenizer_without_a_limit_counts_up_to_the_family_s(dev, tmp_path):
    model = as_processor(dev, tmp_path / "model", model_max_length=10**30)
    found = TruncationFinder(model, DEV, OPTIONS).count(["a cat", "a"])
    assert found.limit < 512 and found.tokens == (5, 1)


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
