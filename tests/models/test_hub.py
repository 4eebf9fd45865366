"""What is downloaded of a Hub model: every file of a tokenizer, no weights of a variant that would not be used."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from prep.models.hub import PIPELINE, locate, other_components, unused_variants
from prep.models.pipeline import _TOKENIZER_FILES
from prep.models.weights import variant_of

STEM = "diffusion_pytorch_model"
FILES = [
    "model_index.json", "sd_xl_base_1.0.safetensors", f"unet/{STEM}.safetensors", f"unet/{STEM}.fp16.safetensors",
    f"unet/{STEM}.non_ema.safetensors", "unet/config.json", f"vae/{STEM}.fp16.safetensors",
    "text_encoder/model.safetensors.index.json", "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model.safetensors.index.fp16.json", "text_encoder/model.fp16-00001-of-00002.safetensors",
    "text_encoder/model-00001-of-00003.fp16.safetensors", "text_encoder/model.fp16.safetensors",
]
UNUSED = [
    "text_encoder/model-00001-of-00003.fp16.safetensors", "text_encoder/model.fp16-00001-of-00002.safetensors",
    "text_encoder/model.fp16.safetensors", "text_encoder/model.safetensors.index.fp16.json",
    f"unet/{STEM}.fp16.safetensors", f"unet/{STEM}.non_ema.safetensors",
]


def test_variants_beside_weights_without_one_are_not_used(tmp_path):
    assert unused_variants(FILES) == UNUSED
    for name in set(FILES) - set(UNUSED):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {part: variant_of(tmp_path / part, stem) for part, stem in (
        ("unet", STEM), ("vae", STEM), ("text_encoder", "model"))}
    assert found == {"unet": "", "vae": "fp16", "text_encoder": ""}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The arguments of each download; the files that the Hub lists, or what listing raises."""
    calls, listed = [], {"files": FILES}

    def snapshot_download(name, **options):
        calls.append({"name": name, **options})
        return str(tmp_path)

    def list_repo_files(name, *, revision):
        if isinstance(listed["files"], Exception):
            raise listed["files"]
        assert (name, revision) == ("owner/name", "v1")
        return [*listed["files"], "odd[1].safetensors", "odd[1].fp16.safetensors"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", list_repo_files)
    return calls, listed


def test_a_download_leaves_them_out(hub, tmp_path: Path):
    calls, _ = hub
    assert locate("owner/name@v1", download=True) == tmp_path
    assert calls == [{"name": "owner/name", "revision": "v1", "allow_patterns": list(PIPELINE),
                      "ignore_patterns": ["odd[[]1].fp16.safetensors", *UNUSED], "local_files_only": False}]


def test_what_only_the_pipeline_of_a_modular_repository_needs_is_left_out():
    files = ["modular_model_index.json", "config.json", "vae/config.json", "transformer/config.json",
             "tokenizer/a.json", "scheduler/scheduler_config.json", "prompt_upsampler/model.safetensors",
             "image_encoder/x/config.json"]
    assert other_components(files) == files[-2:]
    assert other_components([*files, "model_index.json"]) == []


def test_a_model_in_the_cache_is_not_listed(hub):
    calls, listed = hub
    listed["files"] = AssertionError("asked the Hub")
    locate("owner/name@v1")
    assert calls[0]["ignore_patterns"] is None and calls[0]["local_files_only"] is True


def test_a_hub_that_lists_nothing_is_asked_for_everything(hub):
    calls, listed = hub
    listed["files"] = OfflineModeIsEnabled("offline")
    locate("owner/name@v1", download=True)
    assert calls[0]["ignore_patterns"] == []


def test_every_file_of_a_tokenizer_is_downloaded():
    """Newer releases of transformers write chat templates to files of their own; without one, no caption is encoded."""
    for name in _TOKENIZER_FILES:
        assert any(fnmatch(f"tokenizer/{name}", pattern) for pattern in PIPELINE), name
