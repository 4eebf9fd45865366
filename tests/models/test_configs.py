"""What names the components of a pipeline: model_index.json, or modular_model_index.json of a modular repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import INDEX, change_json, write_json, write_model

from prep.errors import ModelError
from prep.models.configs import Configs, copied_index, index_file, is_modular, pipeline_index
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.models.pipeline import scheduler_config, tokenizer_files, weighted_files

COMPONENTS = [name for name, value in INDEX.items() if isinstance(value, list)]


def entry(name: str, *, saved: bool = False, **changes: Any) -> list[Any]:
    """A component as modular_model_index.json names it: `saved` with it, or published beside other repositories."""
    kind = INDEX[name]
    where = {"pretrained_model_name_or_path": "owner/other", "revision": None, "subfolder": name, "type_hint": kind,
             "variant": None, **changes}
    return [*(kind if saved else (None, None)), where]


def modular(root: Path, **entries: Any) -> Path:
    """A modular repository of the same files as `write_model` makes."""
    write_model(root)
    (root / "model_index.json").unlink()
    facts = {name: value for name, value in INDEX.items() if not isinstance(value, list)}
    index = {**facts, "_blocks_class_name": "SomeBlocks", **{name: entry(name) for name in COMPONENTS}, **entries}
    write_json(root / "modular_model_index.json", index)
    return root


@pytest.mark.parametrize("saved", [True, False])
def test_a_modular_repository_is_read_as_any_other(tmp_path, saved):
    plain = write_model(tmp_path / "plain")
    other = modular(tmp_path / "modular", **{name: entry(name, saved=saved) for name in COMPONENTS})
    assert not is_modular(plain) and is_modular(other) and index_file(other).name == "modular_model_index.json"
    index = pipeline_index(other)
    assert {name: index[name] for name in INDEX} == pipeline_index(plain)
    assert (vae_fingerprint(other), text_fingerprint(other)) == (vae_fingerprint(plain), text_fingerprint(plain))
    assert Configs(other).has("vae") and not Configs(other).has("text_encoder_2")
    assert Configs(other).value("_blocks_class_name") == "SomeBlocks"


def test_model_index_json_is_read_where_there_are_both(tmp_path):
    model = write_model(tmp_path / "model")
    write_json(model / "modular_model_index.json", {"_class_name": "Other"})
    assert not is_modular(model) and pipeline_index(model) == INDEX


def test_a_component_that_was_saved_as_a_class_is_of_that_class(tmp_path):
    hint = entry("tokenizer", saved=True, type_hint=["transformers", "AutoTokenizer"])
    assert pipeline_index(modular(tmp_path / "model", tokenizer=hint))["tokenizer"] == INDEX["tokenizer"]


@pytest.mark.parametrize(("name", "read", "first"), [
    ("vae", weighted_files, "cannot read {}/config.json"), ("unet", weighted_files, "cannot read {}/config.json"),
    ("tokenizer", tokenizer_files, "{} has no tokenizer_config.json")])
@pytest.mark.parametrize(("inside", "there"), [("part", "'part' of 'owner/other'"), ("", "'owner/other'")])
def test_a_component_of_another_repository_is_to_be_downloaded(tmp_path, name, read, first, inside, there):
    model = modular(tmp_path / "model", **{name: entry(name, subfolder=inside)})
    if (model / name).is_dir():
        (model / name).rename(tmp_path / name)
    with pytest.raises(ModelError) as caught:
        read(model, name)
    assert caught.value.message.startswith(first.format(model / name))
    assert caught.value.hint == f"modular_model_index.json says that it is {there}: download that into {model / name}"


def test_the_scheduler_of_another_repository_is_to_be_downloaded(tmp_path):
    INDEX_ENTRY = [None, None, {"pretrained_model_name_or_path": "owner/other", "subfolder": "scheduler"}]
    model = modular(tmp_path / "model", scheduler=INDEX_ENTRY)
    with pytest.raises(ModelError) as caught:
        scheduler_config(model)
    assert "says that it is 'scheduler' of 'owner/other'" in caught.value.hint


def test_a_component_in_another_folder_is_never_taken_for_one_in_its_own(tmp_path):
    model = modular(tmp_path / "model", vae=entry("vae", subfolder="vae_of_video"))
    (model / "vae_of_video").mkdir()
    with pytest.raises(ModelError) as caught:
        pipeline_index(model)
    assert caught.value.message == (f"{model / 'modular_model_index.json'} has the component vae in the folder "
                                    "'vae_of_video', expected vae")
    assert caught.value.hint.startswith("rename that folder to vae, and its subfolder in modular_model_index.json")


@pytest.mark.parametrize("value", [
    [], [None] * 3, [None, None, {}], ["os", "system", {}], [None, None, {"type_hint": "x"}],
    [[], {}, {"type_hint": []}],
    [None, None, {"type_hint": ["diffusers"], "subfolder": ["x"], "pretrained_model_name_or_path": 7}],
    [None, None, {"type_hint": [None, None], "subfolder": "../vae\0"}]])
def test_odd_entries_are_one_clear_error(tmp_path, value):
    model = modular(tmp_path / "model", vae=value)
    with pytest.raises(ModelError, match=r"vae in .*modular_model_index\.json is .*, expected AutoencoderKL"):
        weighted_files(model, "vae")
    (model / "vae").rename(tmp_path / "vae")
    with pytest.raises(ModelError):
        weighted_files(model, "vae")


def test_the_index_of_a_copy_names_no_variants_and_no_repository_of_what_is_changed(tmp_path):
    model = modular(tmp_path / "model", vae=entry("vae", variant="fp16"), unet=entry("unet", revision="main"))
    before = json.loads((model / "modular_model_index.json").read_bytes())
    after = copied_index(model, ["unet"])
    assert before["vae"][2].pop("variant") == "fp16" and after["vae"][2].pop("variant") is None
    own = {"pretrained_model_name_or_path": None, "revision": None}
    assert after["unet"][2] == {**before.pop("unet")[2], **own}
    del after["unet"]
    assert after == before
    change_json(model / "modular_model_index.json", odd=[1, 2, 3])
    assert copied_index(model, [])["odd"] == [1, 2, 3] == pipeline_index(model)["odd"]
