"""Models on this computer: batches say what single pictures say, and a second run loads nothing."""

from __future__ import annotations

from pathlib import Path

import describers
import numpy as np
import pytest
import segmenters
import torch

from prep.captioning import local
from prep.captioning.engine import PROMPT, Prepared, Stopped
from prep.captioning.local import LocalModel
from prep.errors import ModelError, OutOfMemoryError
from prep.models.fingerprint import digest_file
from prep.progress import silent

BUILD = {"blip": describers.build_blip, "florence2": describers.build_florence, "qwen2_5_vl": describers.build_qwen,
         "qwen3_vl": lambda path: describers.build_qwen(path, "qwen3_vl")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """`built(name)`: a model, made once."""
    made: dict[str, Path] = {}

    def build(name):
        if name not in made:
            made[name] = BUILD[name](tmp_path_factory.mktemp("models") / name)
        return made[name]

    return build


def engine_of(folder, **differs):
    return LocalModel(str(folder), **{"download": False, "device": "cpu", "batch_size": 4, "max_tokens": 12,
                                      "temperature": 0.0, "file_digest": digest_file, "progress": silent, **differs})


def pictures(*sizes):
    rng = np.random.default_rng(0)
    return [Prepared(data=rng.integers(0, 255, (height, width, 3), np.uint8).tobytes(), width=width, height=height)
            for width, height in sizes]


@pytest.mark.few("blip", "qwen3_vl")
@pytest.mark.parametrize("name", BUILD)
def test_a_batch_says_what_single_pictures_say(built, name):
    engine = engine_of(built(name))
    seen, prompts = pictures((84, 56), (84, 112), (140, 84)), ["what is it?", "and where?", "and where?"]
    together = engine.answer(seen, prompts)
    assert together == [engine.answer([one], [prompt])[0] for one, prompt in zip(seen, prompts, strict=True)]
    assert len({answer.text for answer in together}) > 1 and all(answer.cut for answer in together)
    assert engine.prompt == {"blip": "", "florence2": "<MORE_DETAILED_CAPTION>"}.get(name, PROMPT)
    assert engine.answer(seen[:1], [engine.prompt])[0].text


def test_qwen_is_asked_as_its_library_asks(built):
    """Transformers' own processor, without its part for videos, gives the same inputs."""
    from tiny_pipelines import tokenizers
    from transformers import Qwen2VLProcessor

    class OfPictures(Qwen2VLProcessor):
        attributes = ("image_processor", "tokenizer")

    engine = engine_of(built("qwen2_5_vl"))
    reader = local.Reader(engine._files, engine._config, engine._template)
    text = reader.asking("what?")
    assert text == ("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
                    "<|im_start|>assistant\n")
    picture = np.frombuffer(pictures((84, 56))[0].data, np.uint8).reshape(56, 84, 3)
    made = tokenizers.qwen2_vl_processor(tokenizers.qwen25_vl())
    made.__class__, made.video_processor = OfPictures, None
    wanted = made(text=[text], images=[picture], return_tensors="pt")
    given = reader.inputs([picture], [text])
    assert all(torch.equal(given[name], wanted[name]) for name in ("input_ids", "attention_mask", "pixel_values",
                                                                   "image_grid_thw"))


def test_from_the_command_line(prep, built, bare, monkeypatch):
    words = ("caption", bare, "--model", built("blip"), "--device", "cpu", "--max-tokens", 6, "--batch-size", 2)
    first = prep(*words, "--jobs", 1, "--json")
    assert first.code == 0, first.err
    assert first.json["written"] == 4 and first.json["asked"] == 3
    assert f"note: {built('blip')} describes 3 pictures on this computer (cpu, float32)" in first.err
    texts = {one["path"]: one["captions"] for one in first.json["captions"]}
    assert texts["0.png"] == texts["4.png"] and all(len(lines) == 1 for lines in texts.values())

    def loaded(*_, **__):
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(local, "load_transformers", loaded)
    assert "0 captions written, 0 answers asked for" in prep(*words).out
    assert "3 answers would be asked for" in prep(*words, "--dry-run", "--prompt", "a").out


def test_other_weights_or_words_are_another_model(built, tmp_path):
    one = engine_of(describers.build_qwen(tmp_path / "one"))
    same = engine_of(describers.build_qwen(tmp_path / "same"))
    other = engine_of(describers.build_qwen(tmp_path / "other", template=describers.TEMPLATE + " "))
    assert one.identity == same.identity != other.identity
    assert one.identity["model"] != engine_of(built("blip")).identity["model"]
    assert {engine_of(built("blip"), **differs).identity["temperature"] for differs in (
        {"temperature": None}, {"temperature": 0.5}, {})} == {None, "0.5", "0"}


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_templates_in_other_files(tmp_path, name):
    engine = engine_of(describers.templated_in(describers.build_qwen(tmp_path / "model"), name))
    assert engine._template == describers.TEMPLATE and engine.prompt == PROMPT


def test_a_template_that_asks_for_the_time_is_refused(tmp_path):
    engine = engine_of(describers.with_dates(describers.build_qwen(tmp_path / "model")))
    with pytest.raises(ModelError, match="it writes the date or time into the text"):
        engine.answer(pictures((64, 64)), ["what?"])


def test_a_template_that_is_no_text(tmp_path):
    folder = describers.build_qwen(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read: "):
        engine_of(folder)


def test_models_that_describe_nothing(tmp_path):
    with pytest.raises(ModelError, match="has type segformer, expected one that describes pictures"):
        engine_of(segmenters.build_segformer(tmp_path / "model"))


def test_a_model_that_its_library_cannot_run(built, monkeypatch):
    def broken(*_):
        raise TypeError("can't multiply sequence by non-int of type 'NoneType'")

    monkeypatch.setattr(local.Reader, "inputs", broken)
    with pytest.raises(ModelError, match="cannot describe a picture: can't multiply sequence"):
        engine_of(built("blip")).answer(pictures((64, 64)), [""])


def test_closing_it_ends_an_answer(built):
    engine = engine_of(built("blip"))
    engine.close()
    with pytest.raises(Stopped):
        engine.answer(pictures((64, 64)), [""])


def test_a_batch_that_does_not_fit_is_halved(built, monkeypatch):
    engine, most = engine_of(built("blip")), [2]
    seen = pictures((64, 64), (64, 32), (32, 64))
    wanted = engine.answer(seen, [""] * 3)
    inputs = local.Reader.inputs

    def full(self, few, texts):
        if len(few) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs(self, few, texts)

    monkeypatch.setattr(local.Reader, "inputs", full)
    assert engine.answer(seen, [""] * 3) == wanted
    most[0] = 0
    with pytest.raises(OutOfMemoryError, match="too little memory for one picture") as error:
        engine.answer(seen, [""] * 3)
    assert error.value.hint.startswith("a smaller --side")


@pytest.mark.parametrize(("words", "message"), [
    (("--timeout", 5), "--timeout is for a model of a server, but --endpoint is not given"),
    (("--endpoint", "http://localhost:1", "--batch-size", 5),
     "--batch-size is for a model on this computer, but --endpoint is given"),
    (("--device", "toaster"), "toaster")])
def test_options_of_the_other_engine(prep, built, bare, words, message):
    result = prep("caption", bare, "--model", built("blip"), *words)
    assert result.code == 2 and message in result.err


def test_a_model_that_is_not_here(prep, bare):
    result = prep("caption", bare, "--model", "org/elsewhere")
    assert result.code == 6 and "add --download" in result.err
