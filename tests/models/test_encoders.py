"""The encoders: all of their weights come from files, in the dtype that was asked for, and rows are finite or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import draw
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.text.encoder import TextEncoder
from prep.models.vae import VaeEncoder

TEXT, VAE = "text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"
SD15 = partial(TextEncoder, family=FAMILIES["sd15"], options=TextOptions(max_length=77))
KINDS = {TEXT: SD15, VAE: VaeEncoder}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    return path


def edit(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def configure(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def text(model: Path, compute: str = "float32") -> TextEncoder:
    return SD15(model, device="cpu", compute=compute, dtype="float32")


def vae(model: Path, compute: str = "float32") -> VaeEncoder:
    return VaeEncoder(model, device="cpu", compute=compute, dtype="float32")


def hidden(model: Path, compute: str = "float32") -> np.ndarray:
    return np.stack([row["hidden"] for row in text(model, compute).encode(["a red dog", ""])])


@pytest.mark.parametrize(("part", "lost"), [(TEXT, "embeddings.token_embedding.weight"),
                                            (TEXT, "final_layer_norm.bias"), (VAE, "encoder.conv_in.weight"),
                                            (VAE, "decoder.conv_out.bias")])
def test_a_weight_that_is_missing_is_named_and_not_made_up(model, part, lost):
    edit(model / part, lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.endswith(lost)})
    with pytest.raises(ModelError) as error:
        KINDS[part](model, device="cpu", compute="float32", dtype="float32")
    assert error.value.message.startswith(f"the weights in {(model / part).parent} lack ")
    assert lost in error.value.message and error.value.exit_code == 6
    assert error.value.hint == ("its config.json and weights are from different models or library versions; "
                                "download both again")


def test_of_many_missing_weights_three_are_named(model):
    edit(model / VAE, lambda tensors: {key: tensor for key, tensor in tensors.items() if "encoder." not in key})
    with pytest.raises(ModelError, match=r"vae lack \S+, \S+, \S+ and \d+ more$"):
        vae(model)


@pytest.mark.parametrize(("part", "name"), [(TEXT, "embeddings.token_embedding.weight"),
                                            (VAE, "encoder.conv_in.bias")])
def test_a_weight_of_another_shape_is_named(model, part, name):
    edit(model / part, lambda tensors: {key: torch.cat([tensor, tensor]) if key.endswith(name) else tensor
                                        for key, tensor in tensors.items()})
    with pytest.raises(ModelError) as error:
        KINDS[part](model, device="cpu", compute="float32", dtype="float32")
    assert "do not have the shapes in its config.json: " in error.value.message and name in error.value.message


def test_names_of_old_checkpoints_are_understood(model, tiny_model):
    """transformers before 5 put everything below `text_model`; diffusers before 0.18 had other names in attentions."""
    def below_text_model(tensors: Tensors) -> Tensors:
        old = {f"text_model.{key.removeprefix('text_model.')}": tensor for key, tensor in tensors.items()}
        return {**old, "text_model.embeddings.position_ids": torch.arange(77)[None]}

    def with_old_attentions(tensors: Tensors) -> Tensors:
        names = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
        found = {}
        for key, tensor in tensors.items():
            for new, old in names.items():
                key = key.replace(new, old) if ".attentions.0." in key else key
            found[key] = tensor
        assert set(found) != set(tensors)
        return found

    edit(model / TEXT, below_text_model)
    edit(model / VAE, with_old_attentions)
    pixels = np.full((1, 64, 64, 3), 77, np.uint8)
    np.testing.assert_array_equal(hidden(model), hidden(tiny_model))
    np.testing.assert_array_equal(vae(model).encode(pixels)[0]["latent"], vae(tiny_model).encode(pixels)[0]["latent"])


def test_tensors_that_change_nothing_may_be_there(model, tiny_model):
    """CLIP's own file has both halves; old files have what is computed today."""
    for part, odd in ((TEXT, ("logit_scale", "text_projection.weight", "visual_projection.weight",
                              "vision_model.embeddings.class_embedding", "text_model.embeddings.position_ids")),
                      (VAE, ("encoder.norm.num_batches_tracked",))):
        edit(model / part, lambda tensors, odd=odd: {**tensors, **{name: torch.ones(2) for name in odd}})
    np.testing.assert_array_equal(hidden(model), hidden(tiny_model))
    vae(model)


@pytest.mark.parametrize("compute", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_dtype_in_the_text_encoders_config_decides_nothing(model, tiny_model, compute):
    configure(model / "text_encoder" / "config.json", dtype="float16", torch_dtype="float16")
    np.testing.assert_array_equal(hidden(model, compute), hidden(tiny_model, compute))


@pytest.mark.parametrize("kept", [torch.float16, torch.float32])
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
def test_weights_are_those_of_the_file_converted_once(model, kept, compute):
    for part, load in ((TEXT, lambda: text(model, compute)._pipeline.text_encoder),
                       (VAE, lambda: vae(model, compute)._vae)):
        edit(model / part, lambda tensors: {key: tensor.to(kept) for key, tensor in tensors.items()})
        loaded, filed = load().state_dict(), load_file(model / part)
        prefix = "" if set(filed) <= set(loaded) else "text_model."  # which transformers 5 takes away
        for key, tensor in ((key.removeprefix(prefix), tensor) for key, tensor in filed.items()):
            assert torch.equal(loaded[key], tensor.to(getattr(torch, compute))), key
            assert loaded[key].dtype == getattr(torch, compute)


def test_a_text_encoder_of_another_class(model):
    configure(model / "model_index.json", text_encoder=["transformers", "CLIPTextModelWithProjection"])
    with pytest.raises(ModelError, match=r"is a CLIPTextModelWithProjection, expected CLIPTextModel in family 'sd15'"):
        text(model)


def test_a_tokenizer_that_cannot_be_read(model):
    (model / "tokenizer" / "vocab.json").write_text("{")
    with pytest.raises(ModelError) as error:
        text(model)
    assert error.value.message.startswith(f"cannot load the tokenizer in {model / 'tokenizer'}: ")
    assert "latentry-model-" not in error.value.message and "save_pretrained(DIR)" in error.value.hint


@pytest.mark.parametrize("what", ["caption", "unconditional"])
def test_a_text_row_that_is_not_finite_is_computed_again_in_float32(model, monkeypatch, what):
    encoder = text(model, "bfloat16")
    encode, seen = encoder._pipeline.encode_prompt, []
    broken = {torch.bfloat16}

    def sometimes(*arguments):
        dtype = encoder._pipeline.text_encoder.dtype
        seen.append(dtype)
        found = encode(*arguments)
        return [None if one is None else one * float("nan") for one in found] if dtype in broken else found

    monkeypatch.setattr(encoder._pipeline, "encode_prompt", sometimes)
    row = encoder.encode(["a"])[0] if what == "caption" else encoder.unconditional()
    assert row is not None and np.isfinite(row["hidden"]).all()
    assert seen == [torch.bfloat16, torch.float32] and encoder._pipeline.text_encoder.dtype == torch.bfloat16
    broken.add(torch.float32)
    assert (encoder.encode(["a"])[0] if what == "caption" else encoder.unconditional()) is None


def test_no_unconditional_row_is_an_error_and_not_a_row_of_nan(prep, photos, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(TextEncoder, "_negative", lambda self: [{"hidden": torch.full((77, 32), float("nan"))}])
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16, "--device", "cpu")
    assert result.code == 7 and "the unconditional text row could not be encoded" in result.err
    assert not (tmp_path / "m.json").exists()


def test_a_panic_of_a_library_in_rust_is_an_error_of_the_model(prep, photos, tiny_model, tmp_path, monkeypatch):
    """Of tokenizers, with some files: it derives from `BaseException`, and ended the command with a traceback."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    call = ("encode", photos, "--model", tiny_model, "--resolution", 64, "--cache", tmp_path / "c", "-o",
            tmp_path / "m.json", "--device", "cpu")
    monkeypatch.setattr(TextEncoder, "_forward", lambda *_, **__: (_ for _ in ()).throw(panic("out of range")))
    failed = prep(*call)
    assert failed.code == 6 and "stopped at a text: out of range" in failed.err and "Traceback" not in failed.err


@pytest.mark.parametrize("family", ["sd15", "auraflow", "qwenimage"])
def test_a_token_without_an_embedding_is_named(prep, tmp_path, family):
    """As of a word that was added to a tokenizer, but not to its model: of CLIP, T5 and Qwen."""
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    tiny_pipelines.save(family, tmp_path / "model")
    path = tmp_path / "model/tokenizer/tokenizer.json"
    document, config = json.loads(path.read_text()), path.with_name("tokenizer_config.json")
    said = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    words = document["model"]["vocab"]  # a table, or of T5's kind a list
    first = max(len(words), *(1 + each["id"] for each in document["added_tokens"]))
    document["added_tokens"] += [{"id": first + number, "content": f"foxx{number}", **said} for number in range(300)]
    path.write_text(json.dumps(document))
    configure(config, added_tokens_decoder={str(each.pop("id")): each for each in document["added_tokens"]})
    draw(tmp_path / "photos/0.png", (128, 128), seed=0).with_suffix(".txt").write_text("a foxx299")
    failed = prep("encode", tmp_path / "photos", "--model", tmp_path / "model", "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 128)
    assert failed.code == 6 and f"text_encoder makes the token {first + 299}, but the model knows " in failed.err
