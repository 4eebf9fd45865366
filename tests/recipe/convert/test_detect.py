"""Which tool's file it is, and what is told of a file that is none of theirs."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prep.errors import ConfigError, PathError, Problem
from prep.recipe.convert import detect as formats

KOHYA = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'photos'\n"


@pytest.mark.parametrize(("text", "tool"), [
    (KOHYA, "kohya"), (f"\ufeff{KOHYA}", "kohya"),
    (json.dumps({"datasets": [{"resolution": 512, "subsets": [{"image_dir": "photos"}]}]}), "kohya"),
    (json.dumps([{"path": "photos"}]), "onetrainer"),
    (json.dumps({"concept_file_name": "c.json", "concepts": [{"path": "photos"}]}), "onetrainer"),
    (json.dumps([{"id": "a", "instance_data_dir": "photos"}]), "simpletuner"),
    (json.dumps([{"id": "t", "dataset_type": "text_embeds"}, {"id": "a", "instance_data_dir": "photos"}]),
     "simpletuner")])
def test_a_tool_is_known_by_what_its_file_says_not_by_its_name(convert_text, text, tool):
    assert convert_text(text, name="config.txt").tool == tool


@pytest.mark.parametrize(("text", "says"), [
    ("[]", "it is not in a format that can be converted, expected a kohya dataset TOML ([[datasets]]) or training "),
    ("{}", "it is not in a format"), ("[[directory]]\nplace = 'x'", "it is not in a format"),
    ("[1, 2]", "it is not in a format"),
    ('{"concept_file_name": "c.json", "concepts": null}',
     "it is OneTrainer's main configuration, expected the concepts that it names, 'c.json'"),
    ("[[source]]\npath = 'x'", "it is a recipe already, expected another tool's file"),
    ("{nothing", "it is neither JSON nor TOML"), ("resolution 512", "it is neither JSON nor TOML"),
    ('[{"path": "a", "path": "b"}]', "the key 'path' occurs twice in a table"),
    ('[{"path": "photos", "loss_weight": NaN}]', "it has the number NaN, which is not JSON"),
    ("[" * 100_000, "it is neither JSON nor TOML"),
    (json.dumps([{"path": "p"}] * 10_001), "it lists 10001 sources, expected at most 10000")])
def test_files_of_no_tool(convert_text, text, says):
    with pytest.raises(ConfigError) as error:
        convert_text(text)
    assert says in error.value.message and error.value.exit_code == 3


@pytest.mark.parametrize(("line", "says", "hint"), [
    (r'image_dir = "D:\Users\me\x"', "Invalid hex value (at line 4, ", r"in single quotes, 'D:\pictures', or is"),
    (r'image_dir = "D:\pictures"', "Unescaped '\\' in a string (at line 4, ", "in single quotes"),
    ("enable_bucket = True", "Invalid value (at line 4, ", "true and false in lower case"),
    ("resolution = ", "Invalid value (at line 4, ", "a line is like lr = 1e-4"),
    ("resolution = 512,", "Expected newline or end of document after a statement (at line 4, ", "a line is like"),
    (".".join(["a"] * 50_000) + " = 1", "a key has more than 64 parts (line 4)", "a line is like"),
    (" . ".join(['"a"'] * 50_000) + " = 1", "a key has more than 64 parts (line 4)", "a line is like")])
@pytest.mark.parametrize("head", ["[general]\n\n[[datasets]]\n", "# a comment\n\n[[datasets]]\n", "a = 1\n\n\n",
                                  "[ 'general' ] # of all\n\n\n"])
def test_a_mistake_in_toml_is_told_as_toml_s_with_its_line(convert_text, head, line, says, hint):
    with pytest.raises(ConfigError) as error:
        convert_text(head + line + "\n")
    assert "is not TOML: " in error.value.message and says in error.value.message and hint in error.value.hint


@pytest.mark.parametrize("text", ['{"a": 1,}', '[{"path": "a" "caption": "b"}]', '[\n  {"path": "a = b",\n  }\n]',
                                  '{"a": ' + "9" * 5000 + "}"])
def test_a_mistake_in_json_is_told_as_json_s(convert_text, text):
    with pytest.raises(ConfigError, match=r"it is neither JSON nor TOML: (Expecting|Illegal trailing|Exceeds)"):
        convert_text(text)


def test_a_file_that_is_not_text_or_too_long_or_not_there(convert_text, tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"[\xff]")
    with pytest.raises(ConfigError, match="byte 1 is not UTF-8, expected a kohya"):
        formats.convert(tmp_path / "x")
    monkeypatch.setattr(formats, "MOST_BYTES", 2)
    with pytest.raises(ConfigError, match="has more than 2 bytes, expected a kohya"):
        formats.convert(tmp_path / "x")
    with pytest.raises(PathError, match=r"cannot read .*nothing\.json: No such file"):
        formats.convert(tmp_path / "nothing.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "path", "image_dir", "instance_data_dir", "datasets", "subsets", "general", "text", "image", "repeats",
        "resolution", "caption_shuffle", "id", "dataset_type", "parquet", "balancing", "num_repeats", "prompt_path",
        "prompt_source", "conditioning_data", "resolution_type", "minimum_image_size"]), inner, max_size=4),
    max_leaves=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON, max_size=3) | st.dictionaries(st.just("datasets"), st.lists(JSON, max_size=2)))
def test_any_document_is_converted_or_refused(convert_json, document):
    try:
        assert convert_json(document).recipe.sources
    except Problem as error:
        assert error.message


HEX = f"0x{'f' * 5000}"  # more digits than Python writes
JOB = "job: extension\nconfig:\n  process:\n  - type: sd_trainer\n    datasets:\n    - folder_path: {}\n      {}\n"


@pytest.mark.parametrize("value", ["!!int ''", "!!bool maybe", "!!timestamp soon", "!!float ''"])
def test_yaml_s_tags_on_values_that_they_do_not_have(convert_text, value):
    with pytest.raises(ConfigError, match="it is YAML with a value that its tag does not have"):
        convert_text(f"job: extension\nname: {value}\n", "x.yaml")


def test_numbers_that_are_not_for_people(convert_text, tmp_path):
    with pytest.raises(ConfigError, match="it has a number of more than 4300 digits"):
        convert_text(f"job: extension\nname: 1{':59' * 200_000}\n", "x.yaml")
    with pytest.raises(ConfigError, match=r"datasets\[0\]\.resolution is a number of thousands of digits, expected a"):
        convert_text(JOB.format(tmp_path, f"resolution: {HEX}"), "x.yaml")
    assert "a number of thousands of digits: unknown setting" in " ".join(
        note.text for note in convert_text(JOB.format(tmp_path, f"zz: {HEX}"), "x.yaml").notes)
    assert convert_text(f"[[datasets]]\nzz = {HEX}\n[[datasets.subsets]]\nimage_dir = '.'\n", "x.toml").notes


def test_keys_of_yaml_that_are_no_texts(convert_text, tmp_path):
    converted = convert_text(f"1: 2\nnull: 3\n{JOB.format(tmp_path, '2026-01-01: 5')}    4: 4\n    zz: 5\n", "x.yaml")
    assert any("datasets[0].datetime.date" in note.text for note in converted.notes)
    assert any("4 = 4, zz = 5" in note.text for note in converted.training.notes)
