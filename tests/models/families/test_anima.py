"""Anima: rows are what its conditioner is given, which is loaded with the denoiser and computes as in the pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import AnimaAutoBlocks, AnimaTextConditioner
from diffusers.models.transformers import transformer_cosmos
from model_files import change_json
from original_layout import ANIMA, published
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from prep.models.checkpoints.contents import contents_of
from prep.models.configs import Configs
from prep.models.denoiser.trainable import check_widths, missing_files
from prep.models.families import anima
from prep.models.families.anima import BASE, FAMILY
from prep.models.family import Conditions, TextOptions
from prep.models.fingerprint import text_fingerprint
from prep.models.pipeline import open_single
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.models.text.truncation import TruncationFinder
from train.config.load import parse
from train.models.base import base_fingerprints
from train.models.denoiser import load, predict

CPU = torch.device("cpu")
STEM = "diffusion_pytorch_model.safetensors"
# Of unequal lengths, also of the two tokenizers; no tokens but T5's end; longer than is read.
CAPTIONS = ["a red cat", "two dogs on a long green bench", "", "日本 🐕", "a very long caption. " * 60]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("anima", tmp_path_factory.mktemp("anima") / "model")


@pytest.fixture(scope="module")
def pipeline(model) -> Any:
    return tiny_pipelines.load(model)


def rows_of(model: Path, captions: list[str], dtype: str = "float32") -> list[dict[str, torch.Tensor]]:
    """The text rows of captions, encoded together, `[1, …]` by array as training reads them."""
    encoder = TextEncoder(model, FAMILY, TextOptions(max_length=512), device="cpu", compute="float32", dtype=dtype)
    rows = encoder.encode(captions)
    assert all(row is not None for row in rows)
    return [{name: torch.from_numpy(array).view(torch.uint8 if name == "attention_mask" else KINDS[dtype])[None]
             for name, array in row.items()} for row in rows]


def denoiser_of(model: Path, precision: str = "fp32") -> Any:
    return load(model, parse({"precision": precision}, ""), "flow", CPU, adapt=False)


def asked(pipeline: Any, caption: str, latent: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """What the pipeline gives its conditioner and its denoiser for a caption without guidance, and what they answer."""
    seen: list[dict[str, Any]] = []

    def note(module: Any, args: Any, given: dict[str, Any], answer: Any) -> None:
        seen.append({**given, "answer": answer})

    hooks = [part.register_forward_hook(note, with_kwargs=True)
             for part in (pipeline.text_conditioner, pipeline.transformer)]
    usual, pipeline.guider = pipeline.guider, type(pipeline.guider)(guidance_scale=1.0)
    try:
        pipeline(prompt=caption, latents=latent, num_inference_steps=2, height=64, width=64, output="latents")
    finally:
        pipeline.guider = usual
        for hook in hooks:
            hook.remove()
    return seen


# ---- text ------------------------------------------------------------------------------------------------------------


def test_constants_are_the_pipeline_s():
    blocks = AnimaAutoBlocks()
    guider, = [one for one in blocks.expected_components if one.name == "guider"]
    assert guider.config["guidance_scale"] == FAMILY.sampling.guidance
    length, = [one.default for one in blocks.inputs if one.name == "max_sequence_length"]
    conditioner = AnimaTextConditioner(num_layers=0, model_dim=16, target_dim=16, num_attention_heads=2)
    assert conditioner.config.min_sequence_length == length == FAMILY.text.max_length == FAMILY.text.longest
    assert conditioner.config.target_vocab_size <= BASE**2


@pytest.mark.parametrize("dtype", KINDS)
def test_every_number_of_a_token_is_exact_in_every_dtype(dtype):
    ids = torch.arange(BASE**2)
    digits = anima.digits_of(ids, BASE**2 + 3).to(KINDS[dtype])
    again, mask = anima.ids_of({"t5_ids": digits[None]})
    assert mask.sum() == BASE**2 and torch.equal(again[mask], ids) and not again[~mask].any()


def test_rows_of_a_batch_give_the_conditioner_what_the_pipeline_gives_it(model, pipeline):
    """And the answer is the pipeline's, for each caption by itself."""
    denoiser = denoiser_of(model)
    counter = LengthCounter(model, FAMILY, TextOptions(max_length=512))
    for caption, row, group in zip(CAPTIONS, rows_of(model, CAPTIONS), counter.groups(CAPTIONS), strict=True):
        given = asked(pipeline, caption)[0]
        ids, mask = anima.ids_of(row)
        assert torch.equal(ids[mask], given["target_input_ids"][0]), caption
        assert torch.allclose(row["hidden"], given["source_hidden_states"], atol=1e-5)
        assert row["attention_mask"].all() and given["source_attention_mask"].all() == bool(caption)
        with torch.no_grad():
            mine = anima.conditioned(denoiser.conditioner, row)
        assert mine.shape == (1, 512, 24) and torch.allclose(mine, given["answer"], atol=1e-5), caption
        assert group == -(-row["hidden"].shape[1] // 16) * 16
    assert given["target_input_ids"].shape == given["source_attention_mask"].shape == (1, 512)


def test_the_prediction_of_a_batch_is_the_pipeline_s_for_each_caption(model, pipeline):
    """Also of the empty caption, beside others."""
    denoiser, rows = denoiser_of(model), rows_of(model, CAPTIONS[:4])
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    most = max(row["hidden"].shape[1] for row in rows)
    text = {name: torch.cat([torch.nn.functional.pad(row[name], (0,) * (2 * (row[name].ndim - 2)) + (
        0, most - row[name].shape[1] if name != "t5_ids" else 0)) for row in rows]) for name in rows[0]}
    with torch.no_grad():
        mine = predict(denoiser, latent.expand(4, -1, -1, -1), torch.full((4,), len(denoiser.levels) - 1),
                       Conditions(text=text, sizes_B6=torch.zeros(4, 6)))
    assert text["attention_mask"].sum(1).tolist() == [9, 30, 1, 11] and denoiser.levels[-1] == 1
    for caption, answer in zip(CAPTIONS, mine, strict=False):
        wanted = asked(pipeline, caption, latent[:, :, None])[1]["answer"][0][0, :, 0]
        assert torch.allclose(answer, wanted, atol=1e-4), caption


def test_the_conditioner_computes_without_autocast(model, pipeline):
    """Which would round the angles of positions to 8 bits: of hundreds of tokens, by more than a radian."""
    denoiser, row = denoiser_of(model, "bf16"), rows_of(model, ["a long caption. " * 24], "bfloat16")[0]
    assert {value.dtype for value in denoiser.conditioner.parameters()} == {torch.bfloat16}
    assert not any(value.requires_grad for value in denoiser.conditioner.parameters())
    with torch.no_grad():
        wanted = anima.conditioned(pipeline.text_conditioner.to(torch.bfloat16), row)
        with torch.autocast("cpu", torch.bfloat16):
            mine = anima.conditioned(denoiser.conditioner, row)
            rounded = anima.conditioned(pipeline.text_conditioner, row)
            cosines = [pipeline.text_conditioner.rotary_emb(torch.zeros(1), torch.arange(count)[None])[0][0, -1, 0]
                       for count in (400, 401)]
    pipeline.text_conditioner.to(torch.float32)
    assert mine.dtype == torch.bfloat16 and torch.equal(mine, wanted) and not torch.equal(rounded, wanted)
    assert cosines[0] == cosines[1], "autocast takes position 399 for 400"


def test_both_tokenizers_may_cut_a_caption(model):
    """T5's has one token less, that which ends a text."""
    def cut(caption: str) -> Any:
        return next(TruncationFinder(model, FAMILY, TextOptions(max_length=512)).find([caption]))

    assert cut("a" * 510) is None
    assert (cut("a" * 512).encoder, cut("a" * 512).whole) == ("T5", "Qwen3")
    both, only = cut("a" * 600), cut("é" * 300)
    assert (both.encoder, both.whole, both.read) == ("Qwen3", "", 512)
    assert (only.encoder, only.tokens, only.whole) == ("Qwen3", 600, "T5")


def test_the_tokenizer_of_t5_is_in_the_key_of_a_row(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    assert text_fingerprint(copy) == text_fingerprint(model)
    change_json(copy / "t5_tokenizer" / "tokenizer_config.json", model_max_length=100)
    assert text_fingerprint(copy) != text_fingerprint(model)
    shutil.rmtree(copy / "t5_tokenizer")
    with pytest.raises(ModelError, match=r"t5_tokenizer has no tokenizer_config\.json"):
        text_fingerprint(copy)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_torchvision_is_not_needed(model, monkeypatch):
    """The transformer asks it to resize a mask that has only zeros."""
    denoiser, row = denoiser_of(model), rows_of(model, ["a red cat"])[0]
    given = (torch.randn(1, 16, 8, 12), torch.tensor([300]), Conditions(text=row, sizes_B6=torch.zeros(1, 6)))
    with torch.no_grad():
        wanted = predict(denoiser, *given)
        monkeypatch.delattr(transformer_cosmos, "transforms")
        assert torch.equal(predict(denoiser, *given), wanted) and wanted.shape == (1, 16, 8, 12)


@pytest.mark.parametrize(("config", "side"), [
    ({"extra_pos_embed_type": None}, 2048), ({"extra_pos_embed_type": None, "max_size": [1, 240, 320]}, 2560),
    ({}, 1920), ({"max_size": [128, 240, 320]}, 1920), ({"max_size": [1, 2]}, None), ({"patch_size": [1, 0, 2]}, None),
    ({"max_size": "x"}, None)])
def test_the_longest_side_that_has_positions(config, side):
    """The number of frames counts, too: positions of all axes come of one table."""
    assert anima.longest_side(config) == side


def test_a_longer_side_has_no_positions():
    rope = transformer_cosmos.CosmosRotaryPosEmbed(hidden_size=16)
    patches = anima.longest_side({"extra_pos_embed_type": None}) // 16
    assert rope(torch.zeros(1, 16, 1, 2 * patches, 4))[0].shape[0] == 2 * patches
    with pytest.raises(RuntimeError):
        rope(torch.zeros(1, 16, 1, 2 * patches + 2, 4))


def test_the_conditioner_is_a_part_of_a_run_s_base(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    before = base_fingerprints(copy, FAMILY)
    assert before.keys() == {"denoiser", "conditioner", "scheduler"} and missing_files(copy, FAMILY) == ()
    weights = load_file(copy / "text_conditioner" / STEM)
    save_file({name: value + 1 for name, value in weights.items()}, copy / "text_conditioner" / STEM)
    after = base_fingerprints(copy, FAMILY)
    assert {name for name, digest in after.items() if digest != before[name]} == {"conditioner"}
    (copy / "text_conditioner" / STEM).unlink()
    assert missing_files(copy, FAMILY) == (f"text_conditioner/{STEM}",)


def test_a_conditioner_for_other_rows_is_refused(model, tmp_path):
    copy, text = shutil.copytree(model, tmp_path / "model"), {"hidden": (512, 32)}
    check_widths(copy, FAMILY, Configs(copy)("transformer"), text, "")
    config = copy / "text_conditioner" / "config.json"
    wanted = Configs(copy)("transformer")["text_embed_dim"]
    for changed, said in (({"source_dim": 48}, "source_dim 48, but the cache's rows have 32"),
                          ({"target_dim": 48}, f"target_dim 48, but transformer has text_embed_dim {wanted}")):
        kept = config.read_bytes()
        change_json(config, **changed)
        with pytest.raises(ModelError) as caught:
            check_widths(copy, FAMILY, Configs(copy)("transformer"), text, "")
        assert caught.value.message == f"{copy / 'text_conditioner'} has {said}"
        config.write_bytes(kept)


# ---- single files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(model) -> dict[str, torch.Tensor]:
    """The weights of both models by the authors' names, with what Cosmos' files have beside them."""
    found = published(load_file(model / "transformer" / STEM), ANIMA)
    found |= {f"llm_adapter.{name}": value for name, value in load_file(model / "text_conditioner" / STEM).items()}
    return {**found, "pos_embedder.seq": torch.arange(3.0), "accum_iteration": torch.ones(1)}


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model.", ""])
def test_a_file_has_the_denoiser_and_its_conditioner(model, weights, tmp_path, prefix):
    file, configs = tmp_path / "anima.safetensors", tmp_path / "configs"
    save_file({prefix + name: value.contiguous() for name, value in weights.items()}, file)
    shutil.copytree(model, configs)
    for name in FAMILY.trained_with:
        (configs / name / STEM).unlink()
    assert contents_of(file).family == "anima" and contents_of(file).lacking == ("vae", "text_encoder*")
    found, wanted = denoiser_of(open_single(file, configs)), denoiser_of(model)
    for one, other in ((found.model, wanted.model), (found.conditioner, wanted.conditioner)):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert base_fingerprints(open_single(file, configs), FAMILY).keys() == {"denoiser", "conditioner", "scheduler"}


def test_a_file_without_it_takes_that_of_the_directory(model, weights, tmp_path):
    file = tmp_path / "tuned.safetensors"
    save_file({f"net.{name}": value.contiguous() for name, value in weights.items() if "llm_adapter" not in name}, file)
    assert "text_conditioner" in contents_of(file).lacking
    found = base_fingerprints(open_single(file, model), FAMILY)
    assert found["conditioner"] == base_fingerprints(model, FAMILY)["conditioner"]


def test_ids_of_rows_are_read_as_they_were_stored(model):
    row, other = (rows_of(model, ["a red cat"], dtype)[0]["t5_ids"].float() for dtype in ("float32", "bfloat16"))
    assert np.array_equal(row, other) and row.shape == (1, 512, 2)
