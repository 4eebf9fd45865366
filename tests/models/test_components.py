"""Only classes that are listed are loaded, whatever a model directory names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import INDEX

from prep.errors import ModelError
from prep.models.components import class_of, numbered
from prep.models.fingerprint import TextFiles


@pytest.mark.parametrize("named", [["mod", "Evil"], ["transformers", "AutoModel"], ["diffusers", "CLIPTextModel"],
                                   ["transformers", ["CLIPTextModel"]], "CLIPTextModel", None, [None, None], [],
                                   ["transformers", "CLIPTextModel", "more"], {"transformers": "CLIPTextModel"}])
def test_another_class_is_refused(named):
    with pytest.raises(ModelError) as error:
        class_of({**INDEX, "text_encoder": named}, "text_encoder", Path("m"))
    assert error.value.message.startswith(f"text_encoder in {Path('m/model_index.json')} is ")
    assert "expected CLIPTextModel of transformers" in error.value.message
    assert error.value.hint == "only these classes are loaded; code in a model directory is never run"


FORMER = {"Lumina2Text2ImgPipeline"}  # names that diffusers has given up


def test_every_listed_class_is_one_of_its_library():
    import diffusers

    from prep.models.checkpoints.bounds import known_warnings
    from prep.models.checkpoints.classes import imported
    from prep.models.families.registry import FAMILIES

    for family in FAMILIES.values():
        assert {family.denoiser, "vae", "text_encoder"} <= set(family.components)
        assert {"tokenizer", "processor"} & set(family.components)
        with known_warnings():
            assert all(hasattr(diffusers, pipeline) for pipeline in set(family.pipelines) - FORMER)
        for known in family.components.values():
            for library, kind in known:
                assert imported((library, kind)).__name__, kind


def test_a_text_part_that_another_family_has(tmp_path):
    """Every class is known to some family, but not to this one."""
    from prep.models.families.registry import FAMILIES
    from prep.models.text.pipeline import tokenizers_of

    index = {**INDEX, "tokenizer_2": ["transformers", "T5TokenizerFast"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as error:
        tokenizers_of(tmp_path, FAMILIES["sdxl"], TextFiles(encoders={}, tokenizers={"tokenizer_2": None}))
    assert error.value.message == (f"tokenizer_2 in {tmp_path / 'model_index.json'} is a T5TokenizerFast, expected "
                                   "CLIPTokenizer or CLIPTokenizerFast in family 'sdxl'")


def test_numbered_components():
    index = {**INDEX, "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"], "text_encoder_3": [None, None],
             "tokenizer_2": ["transformers", "CLIPTokenizer"], "text_encoder_x": [], "text_encoder_22": []}
    assert numbered(index, "text_encoder") == ["text_encoder", "text_encoder_2"]
    assert numbered(index, "tokenizer") == ["tokenizer", "tokenizer_2"]
    assert class_of(index, "text_encoder_2", Path("m")) == ("transformers", "CLIPTextModelWithProjection")
    assert numbered({}, "tokenizer") == ["tokenizer"]
