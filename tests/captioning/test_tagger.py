"""Taggers: scores as calculated by hand, files of strangers, and what a second run does not do."""

from __future__ import annotations

import sys
import threading

import numpy as np
import onnx
import pytest
import taggers
from onnx import TensorProto, helper
from PIL import Image

from prep.captioning import onnx_header, tagger
from prep.captioning.engine import Prepared, Stopped
from prep.captioning.tagger import Tagger
from prep.captioning.tags import read_scores
from prep.errors import ModelError, OutOfMemoryError, UsageError
from prep.images.thumbnail import white_square
from prep.models.fingerprint import digest_file
from prep.progress import silent


def engine_of(folder, **differs):
    return Tagger(str(folder), **{"download": False, "device": "cpu", "batch_size": 4, "file_digest": digest_file,
                                  "progress": silent, **differs})


def picture(width, height, seed=0):
    """Noise of another color each, uint8 [H, W, 3]."""
    rng = np.random.default_rng(seed)
    return (rng.random((height, width, 3)) * rng.integers(50, 256, 3)).astype(np.uint8)


def prepared(pixels, side=taggers.SIDE):
    square = white_square(Image.fromarray(pixels), side)
    return Prepared(data=square.tobytes(), width=side, height=side)


def scores_in(answer):
    return {tag: score for _, tag, score in read_scores(answer.text)}


@pytest.fixture
def built(tmp_path):
    return taggers.build(tmp_path / "tagger")


@pytest.mark.parametrize("size", [(32, 32), (64, 32), (32, 128), (96, 64)])
def test_scores_are_those_calculated_by_hand(built, size):
    """Of the white square around a picture, with blue first; tags of other categories are left out."""
    pixels = picture(*size)
    (answer,) = engine_of(built).answer([prepared(pixels)], [""])
    wanted = taggers.scores_of(pixels)
    found = scores_in(answer)
    assert set(found) == set(wanted) - {"rare", "of_an_artist"}
    for name, score in found.items():
        assert score == pytest.approx(wanted[name], abs=4e-3), name  # colors are rounded to whole numbers
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.parametrize("size", [(300, 200), (20, 90), (33, 33), (1, 1), (900, 2)])
def test_pictures_are_scaled_as_the_square_around_them_would_be(size):
    """The square made whole, as the taggers' own page makes it."""
    width, height = size
    longer, seen = max(size), Image.fromarray(picture(*size))
    square = Image.new("RGB", (longer, longer), (255, 255, 255))
    square.paste(seen, ((longer - width) // 2, (longer - height) // 2))
    wanted = np.asarray(square.resize((taggers.SIDE, taggers.SIDE), Image.Resampling.BICUBIC))
    assert np.array_equal(white_square(seen, taggers.SIDE), wanted)


@pytest.mark.parametrize("batch", [None, 1, 3, 8])
def test_models_that_take_one_number_of_pictures(tmp_path, batch):
    engine = engine_of(taggers.build(tmp_path / "tagger", batch=batch))
    seen = [prepared(picture(32, 32, seed)) for seed in range(7)]
    together = engine.answer(seen, [""] * 7)
    assert together == [engine.answer([one], [""])[0] for one in seen] and len({each.text for each in together}) == 7


def test_a_batch_that_does_not_fit_is_halved(built, monkeypatch):
    engine, most = engine_of(built), [2]
    seen = [prepared(picture(32, 32, seed)) for seed in range(4)]
    wanted = engine.answer(seen, [""] * 4)
    engine = engine_of(built)
    run = type(engine._load()).run

    def full(self, names, inputs, ending):
        if len(inputs["picture"]) > most[0]:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 77")
        return run(self, names, inputs, ending)

    monkeypatch.setattr("onnxruntime.InferenceSession.run", full)
    assert engine.answer(seen, [""] * 4) == wanted
    most[0] = 0
    with pytest.raises(OutOfMemoryError, match="cpu has too little memory for one picture") as error:
        engine.answer(seen, [""] * 4)
    assert error.value.hint == "--device cpu, or a smaller model; what was tagged is remembered"


def test_a_library_that_fails_says_why_on_one_line(built, monkeypatch):
    def broken(self, names, inputs, ending):
        raise RuntimeError("a node of type Conv\nhas no weights")

    monkeypatch.setattr("onnxruntime.InferenceSession.run", broken)
    with pytest.raises(ModelError) as error:
        engine_of(built).answer([prepared(picture(32, 32))], [""])
    assert error.value.message == f"the tagger in {built} cannot tag a picture: a node of type Conv"


def test_closing_it_ends_what_is_under_way(tmp_path):
    """A model that computes for a minute stops within a second."""
    going, count = (helper.make_tensor_value_info(name, kind, []) for name, kind in (
        ("going", TensorProto.BOOL), ("count", TensorProto.INT64)))
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["still"]), helper.make_node("Add", ["count", "number"], ["more"])],
        "body", [helper.make_tensor_value_info("number", TensorProto.INT64, []), going, count],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []),
         helper.make_tensor_value_info("more", TensorProto.INT64, [])])
    folder = taggers.build(tmp_path / "tagger")
    model = taggers.model_of()
    model.graph.initializer.extend([helper.make_tensor("times", TensorProto.INT64, [], [1 << 40]),
                                    helper.make_tensor("true", TensorProto.BOOL, [], [True]),
                                    helper.make_tensor("zero", TensorProto.INT64, [], [0])])
    model.graph.node.insert(0, helper.make_node("Loop", ["times", "true", "zero"], ["counted"], body=body))
    model.graph.output.append(helper.make_tensor_value_info("counted", TensorProto.INT64, []))
    onnx.save(model, folder / "model.onnx")
    engine = engine_of(folder)
    engine._session = engine._load()
    threading.Timer(0.3, engine.close).start()
    for _ in range(2):  # and whoever asks later gets no answer either
        with pytest.raises(Stopped):
            engine.answer([prepared(picture(32, 32))], [""])


def test_a_closed_tagger_is_not_loaded(built):
    engine = engine_of(built)
    engine.close()
    with pytest.raises(Stopped):
        engine.answer([prepared(picture(32, 32))], [""])


def test_other_weights_or_tags_are_another_tagger(built, tmp_path):
    same = taggers.build(tmp_path / "same")
    assert engine_of(built).identity == engine_of(same).identity
    other = taggers.build(tmp_path / "other", tags=[*taggers.TAGS[:-1], ("of_an_artist", 1, (9, 9, 9), 8.0)])
    (same / "selected_tags.csv").write_text((same / "selected_tags.csv").read_text().replace("1girl", "1boy"))
    assert len({engine_of(one).digest for one in (built, same, other)}) == 3


def test_without_onnxruntime(built, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="--tagger needs the package onnxruntime, which is not installed") as error:
        engine_of(built)
    assert error.value.hint == "pip install 'latentry[tagger]'"


def test_devices(built, monkeypatch):
    assert engine_of(built, device="auto").describe() == "on this computer (cpu)"
    import torch

    monkeypatch.setattr(tagger, "pick_device", torch.device)
    with pytest.raises(UsageError, match=r"'cuda', but this onnxruntime cannot use it: it has .*CPU") as error:
        engine_of(built, device="cuda")
    assert "onnxruntime-gpu" in error.value.hint
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [tagger.CUDA, "CPUExecutionProvider"])
    engine = engine_of(built, device="cuda:0")
    assert engine.describe() == "on this computer (cuda:0)"
    asked = []

    class Fallen:
        def __init__(self, path, options, providers):
            asked.extend(providers)

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr("onnxruntime.InferenceSession", Fallen)
    with pytest.raises(ModelError, match="onnxruntime cannot use CUDA here"):
        engine.answer([prepared(picture(32, 32))], [""])
    assert asked == [(tagger.CUDA, {"device_id": 0}), "CPUExecutionProvider"]


# ---- files of strangers ----------------------------------------------------------------------------------------------


def external(tensor, location):
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "12")):
        tensor.external_data.add(key=key, value=value)


def inner_tensor(model, where):
    """A tensor in a part of a model."""
    if where == "initializer":
        return model.graph.initializer[0]
    value = TensorProto(data_type=TensorProto.FLOAT, dims=[3], name="inside")
    constant = helper.make_node("Constant", [], ["made"], value=value)
    if where == "constant":
        model.graph.node.insert(0, constant)
        return model.graph.node[0].attribute[0].t
    if where == "function":
        model.functions.append(helper.make_function("own", "f", [], ["made"], [constant], model.opset_import))
        return model.functions[0].node[0].attribute[0].t
    if where == "sparse":
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(value)
        return sparse.values
    branch = helper.make_graph([constant], "branch", [],
                               [helper.make_tensor_value_info("made", TensorProto.FLOAT, [3])])
    model.graph.node.insert(0, helper.make_node("If", ["on"], ["made"], then_branch=branch, else_branch=branch))
    return model.graph.node[0].attribute[0].g.node[0].attribute[0].t


@pytest.mark.parametrize("location", ["../../x", "/etc/passwd", "weights.bin", "*/_ORT_MEM_ADDR_/*"])
@pytest.mark.parametrize("where", ["initializer", "constant", "branch", "function", "sparse"])
def test_weights_in_other_files_are_refused(built, where, location):
    model = taggers.model_of()
    external(inner_tensor(model, where), location)
    (built / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"model\.onnx names other files for its weights, expected a model in one"):
        engine_of(built)


def test_the_numbers_of_fields_are_those_of_onnx():
    """Each field that leads to a tensor is in the table, and no other is."""
    messages = onnx.onnx_ml_pb2.DESCRIPTOR.message_types_by_name
    leading = {"TensorProto"}
    while True:
        more = {name for name, message in messages.items() if any(
            field.message_type is not None and field.message_type.name in leading for field in message.fields)}
        if more <= leading:
            break
        leading |= more
    wanted = {name: {field.number: field.message_type.name for field in messages[name].fields
                     if field.message_type is not None and field.message_type.name in leading} for name in leading}
    assert wanted == onnx_header.PARTS
    numbers = messages["TensorProto"].fields_by_name
    assert (numbers["external_data"].number, numbers["data_location"].number) == (onnx_header.EXTERNAL_DATA,
                                                                                  onnx_header.DATA_LOCATION)


def test_broken_models(built):
    path = built / "model.onnx"
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):  # some beginnings are models again, which lack something
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=str(path)):
            engine_of(built).answer([prepared(picture(32, 32))], [""])
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            engine_of(built).answer([prepared(picture(32, 32))], [""])
        except ModelError as error:
            assert str(path.parent) in error.message


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"\x08\x09ORTM" + b"\x00" * 40, b"\x0b\x0c",
                                  b"\x3a\xff\xff\xff\xff\x0f", b"\xff" * 30, b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_model(built, data):
    (built / "model.onnx").write_bytes(data)
    said = r"model\.onnx (is no ONNX model, or only a part of one|has 0 bytes|has no input)"
    with pytest.raises(ModelError, match=said):
        engine_of(built)


def test_a_file_is_read_as_what_was_looked_through(built):
    """Not as onnxruntime's own format, whose mark can be where an ONNX file has a field that nobody knows."""
    engine, seen = engine_of(built), [prepared(picture(32, 32))]
    wanted = engine.answer(seen, [""])
    whole = (built / "model.onnx").read_bytes()
    (built / "model.onnx").write_bytes(b"\x9a\x06\x06\x00ORTM\x00" + whole)  # field 99, of 6 bytes
    assert engine_of(built).answer(seen, [""]) == wanted


def test_a_model_of_very_many_parts(built, monkeypatch):
    monkeypatch.setattr(onnx_header, "MOST_PARTS", 20)
    with pytest.raises(ModelError, match="has more than 20 parts"):
        engine_of(built)


def test_a_model_that_is_too_large(built, monkeypatch):
    monkeypatch.setattr(onnx_header, "LARGEST", 200)
    with pytest.raises(ModelError, match="expected an ONNX model of less than 2 GiB"):
        engine_of(built)


def test_a_pipe_is_not_waited_for(built):
    import os

    for name in ("model.onnx", "selected_tags.csv"):
        (built / name).unlink()
        os.mkfifo(built / name)
        with pytest.raises(ModelError, match="is a pipe or a device, expected a regular file"):
            engine_of(built)


@pytest.mark.parametrize(("shape", "message"), [
    (["batch", 3, 32, 32], "takes pictures as ['any', 3, 32, 32], colors first, expected [pictures, side, side, 3]"),
    (["batch", 32, 64, 3],
     "takes ['any', 32, 64, 3], expected [pictures, side, side, 3], colors last, as SmilingWolf's taggers take them"),
    (["batch", "height", "width", 3], "takes ['any', 'any', 'any', 3], expected"),
    (["batch", 4096, 4096, 3], "expected at most 1024 pictures of 16 to 2048 pixels"),
    ([1 << 20, 32, 32, 3], "expected at most 1024 pictures of 16 to 2048 pixels"),
    ([32, 3], "takes [32, 3], expected")])
def test_models_that_take_other_pictures(tmp_path, shape, message):
    folder = taggers.build(tmp_path / "tagger", shape=shape)
    with pytest.raises(ModelError) as error:
        engine_of(folder)
    assert message in error.value.message


def test_weights_listed_among_the_inputs(built):
    """As older exporters write them."""
    model = taggers.model_of()
    given = [helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in model.graph.initializer]
    inputs = [*given, *model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    onnx.save(model, built / "model.onnx")
    assert scores_in(engine_of(built).answer([prepared(picture(32, 32))], [""])[0])


@pytest.mark.parametrize(("differs", "message"), [
    ({"end": "Identity"}, "gives numbers that are no scores from 0 to 1"),
    ({"kind": TensorProto.FLOAT16}, "onnxruntime cannot load|takes tensor.float16., expected float32"),
    ({"end": "NotAnOperator"}, "onnxruntime cannot load .*model.onnx: ")])
def test_models_that_give_other_numbers(tmp_path, differs, message):
    engine = engine_of(taggers.build(tmp_path / "tagger", **differs))
    with pytest.raises(ModelError, match=message):
        engine.answer([prepared(picture(32, 32))], [""])


@pytest.mark.parametrize("rows", [5, 12])
def test_a_table_of_other_tags_than_the_models(built, rows):
    lines = [taggers.HEADER, *(f"{number},tag{number},0,1" for number in range(rows))]
    (built / "selected_tags.csv").write_text("\n".join(lines))
    with pytest.raises(ModelError, match=rf"gives an array of \[1, 9\], expected a score for each of the {rows} tags "
                       r"of selected_tags.csv: \[1, "):
        engine_of(built).answer([prepared(picture(32, 32))], [""])


@pytest.mark.parametrize(("table", "message"), [
    (b"", r"has the columns \[\], expected tag_id, name, category and count"),
    (b"a,b\n1,2\n", r"has the columns \['a', 'b'\], expected tag_id, name, category and count"),
    (b"tag_id,name,category,count\n1,x\n", "line 2 of .* has category 'None' and name 'x', expected a number and"),
    (b"tag_id,name,category,count\n1,,0,4\n", "line 2 of .* has category '0' and name ''"),
    (b"tag_id,name,category,count\n1,x,-1,4\n", "line 2 of .* has category '-1'"),
    (b"tag_id,name,category,count\n1,\xff,0,4\n", "is no table of tags: 'utf-8' codec"),
    (b'tag_id,name,category,count\n1,"x,0,4\n', "is no table of tags: unexpected end of data"),
    (b"tag_id,name,category,count\n1," + b"x" * 200_000 + b",0,4\n", "is no table of tags: field larger than"),
    (b"tag_id,name,category,count\n" + b"1,x,0,4\n" * 1_000_000, "has more than 262144 tags"),
    (b"x" * ((1 << 24) + 1), "has more than 16 MiB, expected a table of tags")], ids=range(10))
def test_tables_that_are_none(built, table, message):
    (built / "selected_tags.csv").write_bytes(table)
    with pytest.raises(ModelError, match=message):
        engine_of(built)


def test_files_that_are_missing(built):
    for name in ("model.onnx", "selected_tags.csv"):
        (built / name).unlink()
        with pytest.raises(ModelError, match=f"cannot read .*{name}: No such file"):
            engine_of(built)
