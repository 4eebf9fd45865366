"""What a recipe may choose about text: what each family takes, and that a cache, a run and its pictures agree on it."""

from __future__ import annotations

import json
import shutil

import pytest
from pictures import draw

from prep.encode.resolve import text_options_of
from prep.errors import ConfigError
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.recipe.schema import ModelOptions

LONG = "two dogs on a long green bench in the rain, " * 4
SMALL = ("--resolution", 64, "--step", 32, "--device", "cpu", "--dtype", "float32", "--quiet")


def chosen(family, model, **options):
    return text_options_of(FAMILIES[family], ModelOptions(**options), Configs(model))


def test_what_a_recipe_leaves_out_is_the_family_s(tiny_model):
    assert chosen("sd15", tiny_model) == TextOptions(max_length=77)
    assert chosen("flux", tiny_model) == TextOptions(max_length=512)
    assert chosen("flux", tiny_model, max_length=256) == TextOptions(max_length=256)
    assert chosen("sdxl", tiny_model, text_windows=3, max_length=77) == TextOptions(max_length=77, windows=3)


def test_text_of_t5_and_language_models_is_computed_in_bfloat16_unless_the_recipe_says(tmp_path, prep, photos):
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    for build in ("sd15", "flux"):
        tiny_pipelines.save(build, tmp_path / build)
    found = {}
    for build, options in (("sd15", ("--dtype", "float32")), ("flux", ("--dtype", "float32")), ("flux", ()),
                           ("flux", ("--dtype", "float16", "--compute", "float32"))):
        result = prep("encode", photos, "--model", tmp_path / build, "--cache", tmp_path / "cache", "-o",
                      tmp_path / "m.json", "--resolution", 64, "--step", 32, "--device", "cpu", *options)
        assert result.code == 0, result.err
        fields = json.loads((tmp_path / "m.json").read_bytes())["fields"]
        found[build, *options] = [fields[name]["context"]["compute"] for name in ("latent", "text")]
    assert list(found.values()) == [["float32", "float32"], ["float32", "bfloat16"], ["bfloat16", "bfloat16"],
                                    ["float32", "float32"]]


@pytest.mark.parametrize(("family", "options", "said", "hint"), [
    ("flux", {"max_length": 513}, "model.max_length is 513, expected 1 to 512 for family 'flux'",
     "leave it out for the family's own, 512"),
    ("sd15", {"max_length": 150}, "model.max_length is 150, expected 77 for family 'sd15'",
     "leave it out; longer captions need --text-windows 2 or 3"),
    ("flux", {"text_windows": 2}, "model.text_windows is 2, but the text of family 'flux' is not read in windows",
     "leave it out; --max-length sets the number of tokens"),
    ("flux", {"clip_skip": 1}, "model.clip_skip is 1, but rows of family 'flux' have no hidden states of CLIP",
     "leave it out"),
    ("sd15", {"clip_skip": 9}, "model.clip_skip is 9, expected less than 1, the layers of the text encoder",
     "1 is usual for models that were trained with the last layer but one"),
    ("sdxl", {"text_quantization": "4bit"}, "model.text_quantization is '4bit', but the text encoders of family 'sdxl' "
     "are all CLIP, which is small and never quantized", "leave it out"),
])
def test_what_a_family_cannot_do_is_refused(tiny_model, family, options, said, hint):
    with pytest.raises(ConfigError) as caught:
        chosen(family, tiny_model, **options)
    assert (caught.value.message, caught.value.hint) == (said, hint)


def test_a_denoiser_that_no_run_could_use_is_refused_before_the_model_is_hashed(prep, photos, tiny_model, tmp_path):
    weights = shutil.copytree(tiny_model, tmp_path / "model") / "unet" / "diffusion_pytorch_model.safetensors"
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "model" / "text_encoder" / "model.safetensors").unlink()  # which is found missing by hashing it
    for command in (("encode",), ("encode", "--dry-run"), ("seal",)):
        result = prep(*command, photos, "--model", tmp_path / "model", "--cache", tmp_path / "cache", "-o",
                      tmp_path / "m.json")
        assert result.code == 6, result.err
        assert f"{weights} has {whole - 1} bytes, expected {whole} as its header says" in result.err
    assert not (tmp_path / "cache").exists() and not (tmp_path / "m.json").exists()


def test_options_out_of_bounds(prep, photos, tiny_model, tmp_path):
    words = ("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache")
    assert "model.text_windows is 4, expected a number from 1 to 3" in prep(*words, "--text-windows", 4).err
    assert prep(*words, "--clip-skip", -1).code == 3
    result = prep(*words, "--text-quantization", "2bit")
    assert result.code == 3 and "model.text_quantization is '2bit', expected one of: none, 8bit, 4bit" in result.err


@pytest.mark.parametrize("name", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_windows_from_the_cache_to_the_pictures(prep, train, tmp_path, name):
    """The denoiser takes longer rows; the row without a prompt is as long, so guidance works."""
    tiny_pipelines = pytest.importorskip("tiny_pipelines")
    tiny_pipelines.save(name, tmp_path / "model")
    for number, caption in enumerate([LONG, "a red cat"]):
        draw(tmp_path / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text(caption)
    words = ("encode", tmp_path / "photos", "--model", tmp_path / "model", "--cache", tmp_path / "cache", *SMALL)
    assert prep(*words, "-o", tmp_path / "one.json").code == 0
    result = prep(*words, "-o", tmp_path / "two.json", "--text-windows", 2, "--clip-skip", 1, "--json")
    assert result.code == 0 and result.json["encoded"] == {"latent": 0, "mask": 0, "text": 3}, result.err
    contexts = [json.loads((tmp_path / f"{one}.json").read_text())["fields"]["text"]["context"]
                for one in ("one", "two")]
    assert contexts[1] == {**contexts[0], "clip_skip": 1, "text_windows": 2}
    assert not {"clip_skip", "text_windows"} & set(contexts[0])
    shapes = prep("inspect", tmp_path / "two.json", "--json").json["fields"]["text"]["arrays"]["hidden"]["shapes"]
    assert [shape[0] for shape in shapes] == [154]
    result = train("run", tmp_path / "two.json", "-o", tmp_path / "run", "--steps", 1, "--batch-size", 2,
                   "--device", "cpu", "--precision", "fp32", "--set", "sample.every=1", "--set", "sample.steps=2")
    assert result.code == 0, result.err
    assert list((tmp_path / "run").rglob("*.png"))
    result = train("sample", tmp_path / "run", "--prompt", LONG, "-o", tmp_path / "p.png", "--device", "cpu", "--steps",
                   2)
    assert result.code == 0 and (tmp_path / "p.png").exists(), result.err
    said = prep("diff", tmp_path / "one.json", tmp_path / "two.json").out
    assert "windows of 75 tokens: 2, was the default" in said and "skipped layers of CLIP: 1, was the default" in said
