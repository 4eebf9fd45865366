"""Every command that reads a run, a checkpoint, a LoRA file or a manifest reads those of every family.

A family whose documents have something that others lack, like numbers for each channel of latents, is refused by a
reader that was only tried with the others. `test_families.py` tries what needs no training, in every run of the tests.
"""

from __future__ import annotations

import json

import pytest
from pictures import draw
from viewing import viewing_here
from vision_models import build

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep import api
from prep.models.families.registry import FAMILIES

pytestmark = pytest.mark.slow
METHODS = ("lora", "full")
SMALL = ("--device", "cpu", "--quiet", "--set", "sample.steps=2", "--set", "sample.size=[64, 64]", "--set",
         "sample.every=1", "--set", "validation.every=1", "--precision", "fp32", "--batch-size", 2)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def root(family, tmp_path_factory):
    root = tmp_path_factory.mktemp(family)
    tiny_pipelines.save(family, root / "model")
    for number in range(4):
        draw(root / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text(f"text {number}")
    (root / "prompts.txt").write_text(f"text 1{shown(family, root)}\n")
    build(root / "vision", "dinov2")
    return root


def shown(family, root):
    """What a prompt says of a picture: that of a model that inpaints needs one."""
    return f" --ref {root / 'photos' / '1.png'}" if FAMILIES[family].inpainting else ""


def test_every_command_reads_what_was_written(family, root, prep, train, tmp_path):
    def fine(command, *words):
        with tiny_pipelines.known_warnings():
            result = command(*words)
        assert result.code == 0, (words, result.err)
        return result

    manifest, model = root / "m.json", root / "model"
    fine(prep, "encode", root / "photos", "--model", model, "--cache", root / "cache", "-o", manifest, "--prompts",
         root / "prompts.txt", "--resolution", 64, "--step", 32, "--device", "cpu", "--quiet", "--validation", 0.25,
         "--embed", root / "vision", "--missing-mask", "draw")
    fine(prep, "verify", manifest)
    fine(prep, "inspect", manifest)
    fine(prep, "diff", manifest, manifest)
    assert len(list(api.batches(manifest, batch_size=2, steps=2))) == 2
    dataset = api.open_manifest(manifest)
    assert all(dataset.latent(number) and dataset.text(number) for number in range(4))
    for method in METHODS:
        run, other = root / method, root / f"{method}-other"
        fine(train, "run", manifest, "-o", run, "--method", method, "--steps", 2, *SMALL, "--set", "ema.decay=0.9",
             "--set", "checkpoint.every=1", "--rank", 2)
        fine(train, "check", "--resume", "-o", run, "--steps", 3)
        fine(train, "run", "--resume", "-o", run, "--steps", 3, "--device", "cpu", "--quiet")
        fine(train, "run", "--resume", "-o", run, "--from", "step-000002", "--steps", 3, "--device", "cpu", "--quiet")
        fine(train, "sample", run, "-o", tmp_path / f"{method}.png", "--steps", 2, "--compare", "--device", "cpu")
        fine(train, "sample", run, "-o", tmp_path / f"{method}-text.png", "--steps", 2, "--prompt",
             f"new{shown(family, root)}", "--checkpoint", "step-000001", "--device", "cpu")
        assert fine(train, "evaluate", run, "--steps", 2, "--seeds", 1, "--device", "cpu", "--json").json["checkpoints"]
        fine(train, "replay", run, "--step", 2)
        fine(train, "worst", run)
        assert "wrote" not in fine(train, "report", run).err
        for number, there in enumerate((run, run / "checkpoints" / "step-000003")):
            fine(train, "merge", there, "-o", tmp_path / f"{method}-merged-{number}", "--quiet")
        weights = run / ("lora.safetensors" if method == "lora" else FAMILIES[family].denoiser)
        for number, there in enumerate((run, run / "checkpoints" / "step-000003", weights)):
            fine(train, "check", manifest, "-o", tmp_path / f"{method}-{number}", "--method", method, "--rank", 2,
                 "--init-from", there)
        fine(train, "run", manifest, "-o", other, "--method", method, "--steps", 1, "--rank", 2, *SMALL,
             "--init-from", weights)
        if method == "full":
            reads_whole(weights)
        else:
            fine(train, "merge", weights, "--model", model, "-o", tmp_path / "merged-file", "--quiet")
        with viewing_here(manifest, run, model) as server:
            pages = ("/", "/run", "/sample/0", "/cell/0/0", "/?sort=loss")
            assert {server.get(page).status for page in pages} == {200}
    fine(prep, "gc", root / "cache", "--keep", manifest)


def reads_whole(folder):
    """A denoiser's class of diffusers finds in a run's result all that it has."""
    import diffusers

    kind = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    with tiny_pipelines.known_warnings():
        model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told["unexpected_keys"] and not told["error_msgs"]
    params = {name for name, _ in model.named_parameters()}
    assert not params & set(told["missing_keys"]) and not any(value.is_meta for value in model.state_dict().values())
