"""What weights files say of themselves: true, by the names that web UIs read, and the same after a resume."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from runs import go
from safetensors import safe_open
from safetensors.torch import save_file

from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.fs.place import Local
from train import metadata
from train.config.load import as_table
from train.metadata import checkpoint_metadata, labels_of, result_metadata
from train.runs.directory import begin, claim_run, read_run
from train.setup import Origin

QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2, "steps": 4}
ADAPTER = {f"mid_block.attentions.0.proj_in.lora_{end}.default.weight": torch.zeros(size)
           for end, size in (("A", (2, 4)), ("B", (4, 2)))}


def facts_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def tensor_bytes(path):
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little"):]


def test_noise_and_schedule_have_the_names_of_sd_scripts(make, setup_of):
    made = make(prediction="v_prediction")
    setup = setup_of(made, zero_terminal_snr=True, noise={"offset": 0.1, "pyramid": 0.3, "perturbation": 0.2})
    facts, plain = (result_metadata(each, 4, ADAPTER, {}) for each in (setup, setup_of(made)))
    wanted = {"noise_offset": "0.1", "multires_noise_discount": "0.3", "multires_noise_iterations": "10",
              "ip_noise_gamma": "0.2", "zero_terminal_snr": "True"}
    assert {f"ss_{name}": value for name, value in wanted.items()}.items() <= facts.items()
    assert not {f"ss_{name}" for name in wanted} & set(plain)


def test_a_lora_says_what_web_uis_sort_by(make, setup_of, tmp_path):
    made = make(counts=(4, 2), validation=0)
    setup = setup_of(made, **QUICK, lora={"rank": 2}, optimizer={"lr": 2e-4}, seed=7,
                     result={"author": "A. B.", "trigger": "a red heart"})
    setup = replace(setup, origin=Origin(started="2026-11-22T19:30:00Z", recipe="ab" * 32))
    go(setup, tmp_path / "run")
    facts, path = facts_of(tmp_path / "run" / "lora.safetensors"), tmp_path / "run" / "lora.safetensors"
    size = setup.manifest.buckets[[len(members) for members in setup.index.training].index(4)]
    wanted = {"sai_model_spec": "1.0.1", "architecture": "stable-diffusion-v1/lora", "implementation": "diffusers",
              "title": setup.manifest.path.stem, "resolution": f"{size[0]}x{size[1]}", "date": "2026-11-22T19:30:00Z",
              "author": "A. B.", "trigger_phrase": "a red heart", "prediction_type": "epsilon",
              "hash_sha256": "0x" + hashlib.sha256(tensor_bytes(path)).hexdigest()}
    assert {key: value for key, value in facts.items() if key.startswith("modelspec.")} == {
        f"modelspec.{key}": value for key, value in wanted.items()}
    assert facts["sshs_model_hash"] == hashlib.sha256(tensor_bytes(path)).hexdigest()
    assert (facts["latentry.recipe"], facts["latentry.seed"], facts["latentry.step"]) == ("ab" * 32, "7", "4")
    assert json.loads(facts["latentry.base"]) == setup.model.base
    told = {"output_name": setup.manifest.path.stem, "base_model_version": "sd_v1", "learning_rate": "0.0002",
            "steps": "4", "seed": "7", "v2": "False", "network_dim": "2", "num_train_images": "6",
            "total_batch_size": "4", "gradient_accumulation_steps": "2", "training_started_at": "1795375800.0"}
    assert {name: facts[f"ss_{name}"] for name in told} == told
    buckets = json.loads(facts["ss_bucket_info"])["buckets"].values()
    assert sorted(bucket["count"] for bucket in buckets) == [2, 4]
    assert [tuple(bucket["resolution"]) for bucket in buckets] == list(setup.manifest.buckets)


def test_a_resumed_run_writes_the_same_result(make, setup_of, tmp_path):
    setup = setup_of(make(), **QUICK, lora={"rank": 2})
    setup = replace(setup, origin=Origin(started="2026-11-22T19:30:00Z", recipe="ab" * 32))
    go(setup, tmp_path / "whole")
    go(setup, tmp_path / "run")
    (tmp_path / "run" / "lora.safetensors").unlink()
    again = replace(setup, origin=read_run(Local(tmp_path / "run")).origin)
    assert again.origin == setup.origin
    go(again, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "lora.safetensors").read_bytes() == (
        tmp_path / "whole" / "lora.safetensors").read_bytes()


def test_captions_are_counted_by_their_parts(make, setup_of, monkeypatch):
    setup = setup_of(make(counts=(3, 0), validation=0), **QUICK)
    captions = iter([["red, a heart", "red, big"], ["red"], ["a heart,, red "]])
    samples = type("Samples", (), {"captions": staticmethod(lambda sample: next(captions))})
    index = type("Index", (), {"training": setup.index.training, "samples": samples})
    counted = metadata._tags(index)
    assert list(counted.items()) == [("red", 3), ("a heart", 2), ("big", 1)]
    monkeypatch.setattr(metadata, "MOST_TAGGED", 2)
    assert metadata._tags(setup.index) == {}
    silent = replace(setup, config=replace(setup.config, result=replace(setup.config.result, tags=False)))
    tensors = {"a": torch.zeros(2)}
    monkeypatch.setattr(metadata, "MOST_TAGGED", 9)
    assert "ss_tag_frequency" in result_metadata(setup, 4, ADAPTER, tensors)
    assert "ss_tag_frequency" not in result_metadata(silent, 4, ADAPTER, tensors)


@pytest.mark.parametrize(("family", "prediction", "wanted"), [
    ("sd21", "v_prediction", ("stable-diffusion-v2-768-v/lora", "sd_v2_v", "True")),
    ("sd21", "epsilon", ("stable-diffusion-v2-512/lora", "sd_v2", "True")),
    ("sdxl", "epsilon", ("stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0", "False")),
    ("qwenimage", "flow", ("qwen-image/lora", "qwen_image", None)), ("krea2", "flow", ("krea-2/lora", "krea2", None))])
def test_architectures_by_the_names_of_others(make, setup_of, family, prediction, wanted):
    from prep.models.families.registry import FAMILIES

    setup = replace(setup_of(make(), **QUICK), family=FAMILIES[family], prediction=prediction)
    found = result_metadata(setup, 4, ADAPTER, {"a": torch.zeros(2)})
    assert tuple(map(found.get, ("modelspec.architecture", "ss_base_model_version", "ss_v2"))) == wanted


@pytest.mark.parametrize(("guided", "wanted"), [(True, "flux-1-dev"), (False, "flux-1-schnell")])
def test_flux_is_named_by_its_guidance(make, setup_of, tmp_path, guided, wanted):
    from prep.models.families.registry import FAMILIES

    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel",
                                                    "guidance_embeds": guided}))
    (folder.parent / "model_index.json").write_text(json.dumps({
        "_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}))
    save_file({"weight": torch.zeros(1)}, folder / "diffusion_pytorch_model.safetensors")
    setup = setup_of(make(), **QUICK)
    setup = replace(setup, family=FAMILIES["flux"], model=replace(setup.model, path=tmp_path / "model"))
    assert labels_of(setup).architecture == wanted


def test_a_checkpoint_has_no_date(make, setup_of):
    """Its bytes are compared by digest, and a run may begin again at another time."""
    setup = replace(setup_of(make(), **QUICK), origin=Origin(started="2026-11-22T19:30:00Z"))
    facts = checkpoint_metadata(setup, 1, ADAPTER)
    assert "2026" not in json.dumps(facts) and json.loads(facts["latentry.config"]) == as_table(setup.config)


def test_a_run_begins_when_the_environment_says(make, setup_of, monkeypatch, tmp_path):
    setup = setup_of(make(), **QUICK)
    recipe = tmp_path / "dataset.toml"
    recipe.write_text("# a recipe")
    manifest = replace(setup.manifest, base=tmp_path, document={**setup.manifest.document, "recipe": "dataset.toml"})
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert begin(manifest) == Origin(started="1970-01-01T00:00:00Z",
                                                              recipe=digest_bytes(b"# a recipe"))
    recipe.unlink()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    found = begin(manifest)
    assert found.recipe == "" and found.started > "2026"


def test_a_time_that_is_none_is_refused(make, setup_of, tmp_path):
    setup = replace(setup_of(make(), **QUICK, lora={"rank": 2}), origin=Origin(started="yesterday"))
    claim_run(Local(tmp_path / "run"), setup)
    with pytest.raises(CacheError) as error:
        read_run(Local(tmp_path / "run"))
    assert error.value.message.endswith("run.json: started is 'yesterday', expected a time like 2026-11-22T19:30:00Z")
