"""Only classes that are listed are loaded, whatever a model directory names."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import INDEX

from prep.errors import ModelError
from prep.models.components import class_of, numbered


@pytest.mark.parametrize("named", [["mod", "Evil"], ["transformers", "AutoModel"], ["diffusers", "CLIPTextModel"],
                                   ["transformers", ["CLIPTextModel"]], "CLIPTextModel", None, [None, None], [],
                                   ["transformers", "CLIPTextModel", "more"], {"transformers": "CLIPTextModel"}])
def test_another_class_is_refused(named):
    with pytest.raises(ModelError) as error:
        class_of({**INDEX, "text_encoder": named}, "text_encoder", Path("m"))
    assert error.value.message.startswith(f"text_encoder in {Path('m/model_index.json')} is ")
    assert "expected CLIPTextModel of transformers or " in error.value.message
    assert error.value.hint == "only these classes are loaded; code in a model directory is never run"


def test_every_listed_class_is_one_of_its_library():
    import diffusers
    import transformers

    from prep.models.components import CLASSES

    libraries = {"diffusers": diffusers, "transformers": transformers}
    for known in CLASSES.values():
        for library, kind in known:
            assert getattr(libraries[library], kind).__name__, kind


def test_numbered_components():
    index = {**INDEX, "text_encoder_3": ["transformers", "T5EncoderModel"], "text_encoder_2": [None, None],
             "tokenizer_2": ["transformers", "CLIPTokenizer"], "text_encoder_x": [], "text_encoder_22": []}
    assert numbered(index, "text_encoder") == ["text_encoder", "text_encoder_3"]
    assert numbered(index, "tokenizer") == ["tokenizer", "tokenizer_2"]
    assert class_of(index, "text_encoder_3", Path("m")) == ("transformers", "T5EncoderModel")
    assert numbered({}, "tokenizer") == ["tokenizer"]
