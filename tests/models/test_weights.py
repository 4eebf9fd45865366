"""Safetensors files are looked into before they are digested: a file that is cut off costs no minute."""

from __future__ import annotations

import json
import os
import struct

import pytest
from model_files import change_json, write_json, write_model, write_safetensors

from prep.errors import ModelError
from prep.models.checkpoints.staging import staged
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.models.pipeline import weighted_files
from prep.models.weights import read_shapes, scales_in, variant_of, weight_files

STEM = "diffusion_pytorch_model"


def test_the_files_of_an_index_are_those_that_it_names(tmp_path):
    model = write_model(tmp_path, parts=True)
    names = [path.name for path in weight_files(model / "vae", STEM)]
    assert names == [f"{STEM}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert read_shapes(weight_files(model / "vae", STEM)) == {"a": (4, 2), "b": (3,)}


@pytest.mark.parametrize("named", ["../../secret.safetensors", "weights.bin", "..", "a/b.safetensors"])
def test_an_index_names_nothing_but_safetensors_beside_it(tmp_path, named):
    """transformers unpickles what does not end in .safetensors."""
    index = tmp_path / f"{STEM}.safetensors.index.json"
    write_json(index, {"weight_map": {"a": named}})
    with pytest.raises(ModelError) as error:
        weight_files(tmp_path, STEM)
    assert error.value.message == f"{index} names {named!r}, expected safetensors files beside it"


@pytest.mark.parametrize("placed", [[1, 2], {}, None, "x"])
def test_an_index_that_names_nothing(tmp_path, placed):
    write_json(tmp_path / f"{STEM}.safetensors.index.json", {"weight_map": placed})
    with pytest.raises(ModelError, match=r"has weight_map .*, expected the file of each tensor"):
        weight_files(tmp_path, STEM)


def test_a_file_of_weights_beside_an_index_is_refused(tmp_path):
    """transformers would load the file, diffusers what the index names."""
    model = write_model(tmp_path)
    write_json(model / "vae" / f"{STEM}.safetensors.index.json", {"weight_map": {"a": "part-1.safetensors"}})
    with pytest.raises(ModelError) as error:
        weighted_files(model, "vae")
    assert error.value.message.endswith(f"vae has two sets of weights, {STEM}.safetensors and "
                                        f"{STEM}.safetensors.index.json")
    assert error.value.hint == "libraries disagree on which to load; remove one"


def test_pickled_weights_are_not_read(tmp_path):
    model = write_model(tmp_path)
    (model / "vae" / f"{STEM}.safetensors").rename(model / "vae" / f"{STEM}.bin")
    with pytest.raises(ModelError, match=r"has no diffusion_pytorch_model\.safetensors") as error:
        weighted_files(model, "vae")
    assert "safe_serialization=True" in error.value.hint


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Libraries differ in which of the two they take."""
    model = write_model(tmp_path, parts=True)
    write_safetensors(model / "vae" / f"{STEM}-00002-of-00002.safetensors", {"a": [4, 2]})
    with pytest.raises(ModelError, match="has the tensor 'a', which another file of these weights has too"):
        weighted_files(model, "vae")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_than_its_header_says(tmp_path, change):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"a": [2, 3]})
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(ModelError) as error:
        read_shapes([path])
    assert error.value.message == f"{path} has {size + change} bytes, expected {size} as its header says"


@pytest.mark.parametrize("data", [
    b"", b"two", b"\xff" * 16, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1 << 40) + b"{}",
    struct.pack("<Q", 20_000) + b"[" * 20_000,
    *(struct.pack("<Q", len(header)) + header for header in (
        b'{"a":5}', b'{"a":{"shape":[1],"data_offsets":[0]}}', b'{"a":{"shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}}',
        b'{"a":{"shape":[1],"data_offsets":[0,NaN]}}', b'{"a":{"shape":5,"data_offsets":[0,4]}}', b"\xff")),
])
def test_what_is_no_safetensors_file(tmp_path, data):
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError) as error:
        read_shapes([path])
    assert error.value.message == f"{path} has no safetensors header; it is damaged or has another format"
    assert error.value.hint.startswith("download the model again")


def test_a_file_of_more_tensors_than_any_model_has(tmp_path):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {str(number): [0] for number in range(65537)})
    with pytest.raises(ModelError, match="has 65537 tensors, expected at most 65536"):
        read_shapes([path])


@pytest.mark.parametrize(("offsets", "at"), [((0, 4), 0), ((8, 12), 8)])
def test_tensors_that_overlap_or_leave_gaps(tmp_path, offsets, at):
    first, second = ({"dtype": "F32", "shape": [1], "data_offsets": each} for each in ((0, 4), offsets))
    header = json.dumps({"a": first, "b": second}).encode()
    path, start = tmp_path / "w.safetensors", 8 + len(header)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(offsets[1]))
    with pytest.raises(ModelError) as error:
        read_shapes([path])
    assert error.value.message == (f"{path} has the tensor 'b' from byte {start + at} on, expected {start + 4}: "
                                   "tensors follow each other")


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"anything": -10**8}, {"sides": [4, 10**12]},
                                     {"text_config": {"layers": {"deep": 10**9}}}])
def test_a_number_that_weights_cannot_have(tmp_path, changes):
    model = write_model(tmp_path)
    change_json(model / "text_encoder" / "config.json", **changes)
    with pytest.raises(ModelError, match=r"has [\w.]+ -?10+, more than its weights have numbers") as error:
        weighted_files(model, "text_encoder")
    assert error.value.hint == "config.json and weights are from different models; download both again"


def test_numbers_that_say_no_size_may_be_large(tmp_path):
    model = write_model(tmp_path)
    change_json(model / "text_encoder" / "config.json", rope_theta=10_000_000, max_position_embeddings=10_485_760,
                scale=1e30, hidden=True)
    weighted_files(model, "text_encoder")


def test_scales_are_no_weights(tmp_path):
    names = {"a.weight": [4, 2], "a.scale_weight": [1], "a.scale_input": [1], "b.weight": [4, 2], "b.weight_scale": [4],
             "b.input_scale": [1], "b.comfy_quant": [3], "c.weight": [2], "c.weight_scale_inv": [1], "scaled_fp8": [0],
             "lone.scale_weight": [1], "lone.input_scale": [1], "d.scale": [1]}
    write_safetensors(tmp_path / "w.safetensors", names)
    assert set(read_shapes([tmp_path / "w.safetensors"])) == {
        "a.weight", "b.weight", "c.weight", "lone.scale_weight", "lone.input_scale", "d.scale"}
    assert scales_in(names).of == {"a.weight": "a.scale_weight", "b.weight": "b.weight_scale",
                                   "c.weight": "c.weight_scale_inv"}


def test_weights_that_a_library_quantized(tmp_path):
    """transformers reads such text encoders; a denoiser is not trained on them, and a VAE is small."""
    model = write_model(tmp_path)
    given = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for part in ("vae", "text_encoder"):
        change_json(model / part / "config.json", quantization_config=given)
    weighted_files(model, "text_encoder")
    with pytest.raises(ModelError, match=r"the weights in .*vae are quantized: .*bitsandbytes"):
        weighted_files(model, "vae")


# ---- variants --------------------------------------------------------------------------------------------------------


def as_variant(folder, variant="fp16"):
    """Renames the weights in `folder` as diffusers names those of a variant; the new names."""
    for path in sorted(folder.glob("*.safetensors*")):
        stem, _, rest = path.name.partition(".")
        begin, dash, number = stem.partition("-")
        path.rename(folder / (f"{begin}.{variant}{dash}{number}.{rest}" if rest == "safetensors" else
                              f"{stem}.safetensors.index.{variant}.json"))
    for index in folder.glob("*.index.*.json"):
        placed = json.loads(index.read_text())["weight_map"]
        write_json(index, {"weight_map": {name: file.replace("-", f".{variant}-", 1) for name, file in placed.items()}})
    return sorted(path.name for path in folder.iterdir() if path.name != "config.json")


def test_weights_that_have_only_a_variant_are_used_under_their_usual_name(tmp_path):
    model, plain = write_model(tmp_path / "variant"), write_model(tmp_path / "plain")
    usual = vae_fingerprint(model)
    assert as_variant(model / "vae") == [f"{STEM}.fp16.safetensors"]
    files = weighted_files(model, "vae")
    assert [path.name for path in files.weights] == [f"{STEM}.fp16.safetensors"]
    with staged(files) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", f"{STEM}.safetensors"]
    assert vae_fingerprint(model) == usual, "the same bytes"
    write_safetensors(model / "vae" / f"{STEM}.fp16.safetensors", {"a": [4, 2], "b": [4]})
    assert vae_fingerprint(model) != usual
    text = text_fingerprint(plain)
    as_variant(plain / "text_encoder", "bf16")
    assert text_fingerprint(plain) == text


def test_a_variant_in_several_files(tmp_path):
    model = write_model(tmp_path, parts=True)
    names = as_variant(model / "vae")
    assert names == [f"{STEM}.fp16-00001-of-00002.safetensors", f"{STEM}.fp16-00002-of-00002.safetensors",
                     f"{STEM}.safetensors.index.fp16.json"]
    files = weighted_files(model, "vae")
    assert [path.name for path in files.weights] == names[:2]
    with staged(files) as folder:
        index = json.loads((folder / f"{STEM}.safetensors.index.json").read_text())
        assert {(folder / name).is_file() for name in index["weight_map"].values()} == {True}
    write_safetensors(model / "vae" / f"{STEM}.fp16.safetensors", {"a": [4, 2], "b": [3]})
    with pytest.raises(ModelError, match=r"has two sets of weights, .*\.fp16\.safetensors and .*index\.fp16\.json"):
        weighted_files(model, "vae")


@pytest.mark.parametrize("parts", [False, True])
def test_weights_without_a_variant_come_first(tmp_path, parts):
    model = write_model(tmp_path, parts=parts)
    usual, digest = weighted_files(model, "vae"), vae_fingerprint(model)
    for name in (f"{STEM}.fp16.safetensors", f"{STEM}.non_ema.safetensors"):
        write_safetensors(model / "vae" / name, {"other": [1]})
    write_json(model / "vae" / f"{STEM}.safetensors.index.bf16.json", {"weight_map": {"a": "none.safetensors"}})
    assert weighted_files(model, "vae") == usual and vae_fingerprint(model) == digest


def test_several_variants_and_none_without(tmp_path):
    model = write_model(tmp_path)
    as_variant(model / "vae")
    write_safetensors(model / "vae" / f"{STEM}.non_ema.safetensors", {"a": [4, 2], "b": [3]})
    with pytest.raises(ModelError) as error:
        weighted_files(model, "vae")
    assert error.value.message == (f"{model / 'vae'} has weights of the variants fp16, non_ema, and none without a "
                                   "variant")
    assert error.value.hint == "keep those of one variant in the directory, and move the others elsewhere"


@pytest.mark.parametrize("name", ["model.fp16.safetensors", f"{STEM}.fp16.bin", f"{STEM}.fp16.safetensors.txt",
                                  f"{STEM}.a-b.safetensors", f"x{STEM}.fp16.safetensors"])
def test_other_names_are_of_no_variant(tmp_path, name):
    (tmp_path / name).touch()
    assert variant_of(tmp_path, STEM) == ""


def test_a_directory_that_cannot_be_listed(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*gone: No such file or directory"):
        variant_of(tmp_path / "gone", STEM)
