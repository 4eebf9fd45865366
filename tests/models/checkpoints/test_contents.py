"""What a header says of a single file, and the configs that the package has for published models."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import save_file

from prep.errors import ModelError
from prep.models.checkpoints.contents import PUBLISHED, contents_of
from prep.models.checkpoints.converted import empty_model, weights_of
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.hub import locate
from prep.models.pipeline import infer_family, prediction_of, scheduler_config, tokenizer_files, weighted_files
from prep.models.text.tokenizer import load_tokenizer

# Parameters of UNet, VAE and text encoders, as model cards and papers give them.
PARAMETERS = {"sd15": (859_520_964, 83_653_863, 123_060_480), "sd21": (865_910_724, 83_653_863, 340_387_840),
              "sd21-base": (865_910_724, 83_653_863, 340_387_840),
              "sdxl": (2_567_463_684, 83_653_863, 123_060_480, 694_659_840)}
FIVE = 5 * 320 * 9  # of the first layer: five channels more, for inpainting
PARAMETERS |= {f"{name}_inpaint": (PARAMETERS[name][0] + FIVE, *PARAMETERS[name][1:])
               for name in ("sd15", "sd21", "sdxl")}
FIRST, CONTEXT = "input_blocks.0.0.weight", "input_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight"


def unet(family: str) -> dict[str, torch.Tensor]:
    """Tensors of a UNet that tell its family, in the published shapes."""
    plain, _, inpainting = family.partition("_")
    width, at = {"sd15": (768, 1), "sd21": (1024, 1), "sdxl": (2048, 4)}[plain]
    found = {FIRST: torch.zeros(320, 9 if inpainting else 4, 3, 3),
             CONTEXT.format(at): torch.zeros(320 * (1 + (at > 1)), width)}
    if plain == "sdxl":
        found["label_emb.0.0.weight"] = torch.zeros(1280, 2816)
    return {f"model.diffusion_model.{name}": value for name, value in found.items()}


@pytest.mark.parametrize("name", PARAMETERS)
def test_configs_of_the_package_are_those_of_published_models(name):
    folder, found = PUBLISHED / name, []
    index = json.loads((folder / "model_index.json").read_text())
    for component in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if component in index:
            library, kind = index[component]
            config = json.loads((folder / component / "config.json").read_text())
            with torch.device("meta"):
                model = (getattr(diffusers, kind).from_config(config) if library == "diffusers" else
                         getattr(transformers, kind)(transformers.CLIPTextConfig(**config)))
            found.append(sum(value.numel() for value in model.parameters()))
    assert tuple(found) == PARAMETERS[name]
    family = FAMILIES[infer_family(folder)]
    assert family.name == name.partition("-")[0]
    assert prediction_of(folder, family) == ("v_prediction" if name == "sd21" else "epsilon")
    assert Configs(folder).width("vae", "latent_channels") == 4


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_package_s_tokenizers_give_clip_s_tokens(name):
    """Ids of the published tokenizer; padding is the end of text, of OpenCLIP's encoders the token 0."""
    index = json.loads((PUBLISHED / name / "model_index.json").read_text())
    for component in (each for each in index if each.startswith("tokenizer")):
        tokenizer = load_tokenizer("CLIPTokenizer", tokenizer_files(PUBLISHED / name, component))
        assert len(tokenizer) == 49408 and tokenizer.model_max_length == 77
        found = tokenizer(["A photo of a cat", "héllo, wörld!"], padding="max_length").input_ids
        pad = 0 if "sd21" in name or component == "tokenizer_2" else 49407
        assert found[0][:8] == [49406, 320, 1125, 539, 320, 2368, 49407, pad] and len(found[0]) == 77
        assert tokenizer.decode(found[1], skip_special_tokens=True).replace("!", "").strip() == "héllo , wörld"


@pytest.mark.parametrize(("family", "more", "metadata", "configs", "prediction"), [
    ("sd15", {}, None, "sd15", "epsilon"), ("sdxl", {}, None, "sdxl", "epsilon"),
    ("sd15_inpaint", {}, None, "sd15_inpaint", "epsilon"), ("sd21_inpaint", {}, None, "sd21_inpaint", "epsilon"),
    ("sdxl_inpaint", {}, None, "sdxl_inpaint", "epsilon"),
    ("sdxl", {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, None, "sdxl", "v_prediction"),
    ("sdxl", {}, {"modelspec.prediction_type": "v"}, "sdxl", "v_prediction"),
    ("sd21", {}, {"modelspec.prediction_type": "v"}, "sd21", "v_prediction"),
    ("sd21", {}, {"modelspec.prediction_type": "epsilon"}, "sd21-base", "epsilon"),
    ("sd21", {"v_pred": torch.zeros(0)}, None, "sd21", "v_prediction")])
def test_stable_diffusion_needs_its_file_alone(family, more, metadata, configs, prediction, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({**unet(family), **more}, path, metadata=metadata)
    model = locate(path)
    assert str(model) == str(path) and model / "unet" == PUBLISHED / configs / "unet"
    assert infer_family(model) == family and prediction_of(model, FAMILIES[family]) == prediction
    assert scheduler_config(model).get("rescale_betas_zero_snr", False) == ("ztsnr" in more)


@pytest.mark.parametrize(("width", "family"), [(64, "flux"), (384, "flux_fill")])
def test_flux_tells_whether_it_inpaints_by_its_first_layer(width, family, tmp_path):
    path = tmp_path / "x.safetensors"
    names = ("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight", "vector_in.in_layer.weight")
    save_file({"img_in.weight": torch.zeros(2, width), **{name: torch.zeros(2, 2) for name in names}}, path)
    assert contents_of(path).family == family


def test_what_sd_2_predicts_is_never_guessed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(unet("sd21"), path)
    with pytest.raises(ModelError, match="some models predict noise and some v, and the file does not say which"):
        locate(path)
    for configs, prediction in (("sd21", "v_prediction"), ("sd21-base", "epsilon")):
        assert prediction_of(locate(f"{path}@{configs}"), FAMILIES["sd21"]) == prediction
    save_file({**unet("sd21"), "v_pred": torch.zeros(0)}, path)
    assert prediction_of(locate(f"{path}@sd21-base"), FAMILIES["sd21"]) == "v_prediction", "the file knows"


@pytest.mark.parametrize(("names", "said"), [
    ({"lora_te1_x.alpha": 1}, "is a LoRA, expected a model"),
    ({"transformer.x.lora_A.weight": 1}, "is a LoRA, expected a model"),
    ({"lycoris_x.lokr_w1": 1}, "is a LoRA, expected a model"),
    ({"encoder.conv_in.weight": 1, "decoder.conv_in.weight": 1}, "has a VAE and no denoiser, expected a model"),
    ({"text_encoders.t5xxl.transformer.shared.weight": 1}, "has text encoders and no denoiser, expected a model"),
    ({"input_blocks.0.0.weight": (2, 4, 3, 3), "x.attn2.to_k.weight": (2, 1280)},
     "is the refiner of SDXL, which is not supported"),
    ({"input_blocks.0.0.weight": (2, 8, 3, 3), "x.attn2.to_k.weight": (2, 768)},
     "is a UNet that takes 8 channels, expected 4, or 9 to inpaint"),
    ({}, "has no tensors")])
def test_other_files_say_what_they_are(names, said, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(size) for name, size in names.items()}, path)
    with pytest.raises(ModelError, match=said):
        locate(path)


def test_tensors_of_another_kind_of_denoiser(tiny_model, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"odd.weight": torch.zeros(2), "names.weight": torch.zeros(2)}, path)
    files = weighted_files(locate(f"{path}@{tiny_model}"), "unet")
    with pytest.raises(ModelError) as error:
        weights_of(files, empty_model(files))
    assert error.value.message == (f"the unet in {path} is no UNet2DConditionModel as in {tiny_model / 'unet'}, or "
                                   "diffusers does not know its names")


def test_a_changed_file_is_read_again(tmp_path):
    path = Path(tmp_path / "x.safetensors")
    save_file(unet("sd15"), path)
    assert contents_of(path).family == "sd15"
    save_file(unet("sdxl"), path)
    assert contents_of(path).family == "sdxl"
