"""The memory of encoders, counted on shapes, is that of the tensors which real ones make."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
import transformers
import vision_models

from prep.errors import OutOfMemoryError
from prep.models.configs import Configs
from prep.models.device import peaks
from prep.models.device.counting import Counted
from prep.models.device.peaks import at_once, text_peak, vae_peak, vision_peak
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.fingerprint import text_files
from prep.models.pipeline import infer_family
from prep.models.text.pipeline import load_encoder, spoken
from prep.models.vae import load_vae, posterior, use_tiles
from prep.models.vision.encoder import outputs
from prep.models.vision.model import vision_files, vision_model

SLOW = tiny_pipelines.SECONDARY
BUILDS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in tiny_pipelines.FAMILIES]


@pytest.mark.few
@pytest.mark.parametrize("build", BUILDS)
def test_a_vae_is_counted_as_it_encodes(build, tmp_path):
    model = tiny_pipelines.save(build, tmp_path / "model")
    vae = load_vae(model, torch.bfloat16)
    for count in (1, 2):
        told = vae_peak(model, "bfloat16", (128, 96), on_cpu=False).of(count)
        with Counted() as counted, torch.inference_mode():
            counted.add("weights", [*vae.parameters(), *vae.buffers()])
            counted.reset_peak()
            image = torch.zeros(count, 96, 128, 3, dtype=torch.uint8).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
            posterior(vae, image.to(torch.bfloat16))
        assert told == pytest.approx(sum(counted.peak.values()), rel=0.01), count


def test_the_kept_heap_has_holes(tiny_model, monkeypatch):
    """Where the CPU's is kept, since it has no huge pages."""
    for kept, huge, more in ((True, False, peaks.HOLES), (True, True, 1), (False, False, 1)):
        monkeypatch.setattr(peaks, "keeps_heap", lambda kept=kept: kept)
        monkeypatch.setattr(peaks, "has_huge_pages", lambda huge=huge: huge)
        vae_peak.cache_clear()
        here, there = (vae_peak(tiny_model, "float32", (128, 96), on_cpu=on_cpu) for on_cpu in (True, False))
        assert here.each == int(there.each * more) and here.weights == there.weights
    vae_peak.cache_clear()


@pytest.mark.slow
def test_tiles_take_less(tiny_model):
    assert vae_peak(tiny_model, "float32", (512, 512), 128).each < vae_peak(tiny_model, "float32", (512, 512)).each
    vae = load_vae(tiny_model, torch.float32)
    use_tiles(vae, 128)
    with Counted() as counted, torch.inference_mode():
        counted.add("weights", vae.parameters())
        counted.reset_peak()
        posterior(vae, torch.zeros(1, 3, 512, 512))
    told = vae_peak(tiny_model, "float32", (512, 512), 128, on_cpu=False)
    assert told.of(1) == pytest.approx(sum(counted.peak.values()), rel=0.25)


@pytest.mark.few
@pytest.mark.parametrize("build", BUILDS)
def test_text_encoders_are_counted_as_they_encode(build, tmp_path):
    """Each as its pipeline calls it, but for what that does with the result; T5's scores are copied once more."""
    model = tiny_pipelines.save(build, tmp_path / "model")
    name = infer_family(model)
    family, files = FAMILIES[name], text_files(model)
    options, found, length = TextOptions(max_length=60), {}, 60
    if family.text.vision is not None:
        length += family.references.most * family.text.vision.tokens
    for each in files.encoders:
        encoder = load_encoder(model, family, each, files, torch.bfloat16)
        with Counted() as counted, torch.inference_mode():
            counted.add("weights", [*encoder.parameters(), *encoder.buffers()])
            counted.reset_peak()
            tokens = torch.zeros((1, length), dtype=torch.int64)
            encoder(tokens, attention_mask=torch.ones_like(tokens),
                    output_hidden_states="T5" not in type(encoder).__name__)
        found[spoken(each)] = sum(counted.peak.values())
    told = text_peak(model, family, options, "bfloat16", 1)
    assert told.of(1) == pytest.approx(max(found.values()), rel=0.12)


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_vision_models_are_counted_as_they_embed(kind, tmp_path):
    files = vision_files(str(vision_models.build(tmp_path / "model", kind)), download=False)
    model = vision_model(files, lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
    tower = getattr(transformers, model.kind.model).from_pretrained(model.folder).eval()
    for count in (1, 3):
        with Counted() as counted, torch.inference_mode():
            counted.add("weights", [*tower.parameters(), *tower.buffers()])
            counted.reset_peak()
            outputs(tower, model.kind.output, torch.zeros(count, 32, 32, 3, dtype=torch.uint8).permute(
                0, 3, 1, 2).float())
        assert vision_peak(model).of(count) == pytest.approx(sum(counted.peak.values()), rel=0.02), count


def test_no_weight_is_read(tiny_model, monkeypatch):
    monkeypatch.delattr("prep.models.checkpoints.stored._read")
    family = FAMILIES["sd15"]
    options = TextOptions(max_length=family.text.shapes(Configs(tiny_model), TextOptions(max_length=77))["hidden"][0])
    assert text_peak(tiny_model, family, options, "float32", 4).weights > 0
    assert vae_peak(tiny_model, "float32", (256, 256)).weights > 0


def test_as_many_pictures_as_memory_holds(tiny_model, monkeypatch):
    monkeypatch.setattr(peaks, "PLENTY", 1 << 30)
    peak = vae_peak(tiny_model, "float32", (256, 192))

    def chosen(free, *, fewer=True):
        monkeypatch.setattr(peaks, "available", lambda: free)
        return at_once(tiny_model, "float32", (256, 192), 0, "cpu", wanted=4, fewer=fewer)

    assert [chosen(peak.of(count)) for count in (9, 4, 3, 1)] == [4, 4, 3, 1]
    assert chosen(peak.of(2), fewer=False) == 4, "as was asked for"
    assert chosen(peak.of(1) - 1) == 1, "a forecast is not that exact"
    assert chosen(None) == 4
    with pytest.raises(OutOfMemoryError, match=r"the VAE takes .* of memory for a picture of 256x192 pix") as told:
        chosen(int(peaks.SURELY * peak.of(1)) - 1)
    assert told.value.exit_code == 9 and "--tile 512" in told.value.hint


def test_what_surely_fits_is_not_counted(tiny_model, monkeypatch):
    monkeypatch.delattr(peaks, "vae_peak")
    monkeypatch.setattr(peaks, "available", lambda: 8 << 30)
    assert at_once(tiny_model, "float32", (256, 256), 0, "cpu", wanted=4, fewer=True) == 4


def test_importing_options_imports_no_torch():
    code = "import prep.encode.dry_run, prep.encode.execute, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
