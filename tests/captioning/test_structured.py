"""Captions that are JSON objects: what is asked for, what is checked, and that nothing on the way harms them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_server import ChatServer, Reply, completion
from hypothesis import given
from hypothesis import strategies as st

from prep.captioning.engine import Answer, Unanswered
from prep.captioning.structured import Schema, schema_of
from prep.captioning.template import Wording
from prep.captions.options import CaptionOptions
from prep.captions.variants import has_wildcards, spell_json, variants_of
from prep.errors import ConfigError

# Of https://docs.bfl.ml/guides/usecases_t2i_json_prompting, in part.
SCENE = {"type": "object", "required": ["scene", "subjects"], "additionalProperties": False, "properties": {
    "scene": {"type": "string", "description": "what is seen"}, "mood": {"enum": ["calm", "wild"]},
    "subjects": {"type": "array", "items": {"type": "object", "required": ["position"], "properties": {
        "position": {"type": ["string", "null"]}, "count": {"type": "integer"}}}}}}
GOOD = {"scene": "a {red|blue} room,, and more, \"said\" she", "subjects": [{"position": None, "count": 2}],
        "mood": "calm"}


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read(text, **differs):
    return Schema(document=SCENE).read(Answer(text=text, **differs))


@pytest.mark.parametrize("around", ["{}", "```json {} ```", "``` {} ```", "Here it is: {} Enjoy!"])
def test_objects_are_read(around):
    spelled = json.dumps(GOOD, indent=1)
    assert read(around.replace("{}", spelled)) == Answer(text=compact(GOOD))


@pytest.mark.parametrize(("value", "fault"), [
    ({"scene": "a"}, "the answer has no 'subjects'"),
    ({"scene": 1, "subjects": []}, "'scene' of the answer is 1, expected string"),
    ({"scene": "a", "subjects": [{"position": "b"}, {}]}, "'subjects[1]' of the answer has no 'position'"),
    ({"scene": "a", "subjects": [{"position": 2}]},
     "'subjects[0].position' of the answer is 2, expected string or null"),
    ({"scene": "a", "subjects": [{"position": "b", "count": True}]},
     "'subjects[0].count' of the answer is True, expected integer"),
    ({"scene": "a", "subjects": [], "mood": "sad"}, "'mood' of the answer is 'sad', expected one of ['calm', 'wild']"),
    ({"scene": "a", "subjects": [], "x": 1}, "the answer has 'x', which the schema has not")])
def test_objects_of_another_kind(value, fault):
    answer = read(json.dumps(value))
    assert isinstance(answer, Unanswered) and fault in answer.detail


@pytest.mark.parametrize("text", ["a cat", "", "[1]", "{", "}{", "[" * 100_000, '{"scene": NaN, "subjects": []}',
                                  "{}{}"])
def test_what_is_no_object(text):
    assert isinstance(read(text), Unanswered)


def test_a_refusal_stays_one_and_a_cut_answer_says_why():
    refusal = Answer(text="no", refused=True)
    assert Schema(document=SCENE).read(refusal) is refusal
    assert read('{"scene": "a', cut=True) == Unanswered(detail="the answer was cut off: raise --max-tokens")


@pytest.mark.parametrize(("text", "message"), [
    ("{", "Expecting property name"), ("[]", "the schema is [], expected an object"),
    ('{"type": "array"}', "the schema has type 'array', expected \"object\""), ("{}", "the schema has type None"),
    ('{"type": "object", "anyOf": []}', "the schema has 'anyOf', expected only type, properties, required"),
    ('{"type": "object", "properties": {"a": {"type": "text"}}}', "'a' of the schema has type 'text', expected one of"),
    ('{"type": "object", "required": "a"}', "the schema has required = 'a', expected another kind of value"),
    ('{"type": "object", "properties": {"a": {"items": {"pattern": "(a+)+"}}}}', "'a[]' of the schema has 'pattern'"),
    ('{"items": ' * 20 + "{}" + "}" * 20, "is nested too deeply, expected at most 16 levels"),
    ("[" * 100_000, "has more than 65536 bytes"), ("[" * 60_000, "nested too deeply")], ids=range(11))
def test_schemas_that_are_refused(tmp_path, text, message):
    (tmp_path / "schema.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        schema_of(tmp_path / "schema.json")
    assert message in error.value.message and "for example" in error.value.hint


def test_a_schema_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        schema_of(tmp_path / "schema.json")


# ---- what captions go through ----------------------------------------------------------------------------------------

VALUES = st.recursive(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z")), max_size=8) |
                      st.integers() | st.booleans() | st.none(),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner,
                                                                                  max_size=3), max_leaves=8)
OPTIONS = st.fixed_dictionaries({
    "wildcards": st.booleans(), "shuffle": st.booleans(), "dropout": st.sampled_from([0.0, 0.5]),
    "keep_tokens": st.integers(0, 2), "together": st.sampled_from(["", ";", ":"]),
    "keep_separator": st.sampled_from(["", "|||", ","])})


@given(st.dictionaries(st.text("abc{}|, ", min_size=1, max_size=6).map(str.strip), VALUES, min_size=1, max_size=4),
       OPTIONS)
def test_variants_leave_objects_as_they_are(value, options):
    line = " ".join(compact(value).split())
    assert variants_of([line], CaptionOptions(**options)) == ((line, 1.0),)
    assert not has_wildcards(line)
    ((worded, _),) = variants_of([line], CaptionOptions(trigger="sks", **options))
    assert json.loads(worded) == {"trigger": "sks", **json.loads(line)} or "sks" in line


@pytest.mark.parametrize("text", ["\ud83d", "a \udca9\ud83d é"])
def test_objects_with_unpaired_surrogates_stay_text(text):
    """Which only escapes of JSON can write: also where an object is written again."""
    line = json.dumps({"a": text, "b": "é"})
    ((worded, _),) = variants_of([line], CaptionOptions(trigger="sks"))
    for written in (worded, spell_json(json.loads(worded))):
        written.encode()
        assert json.loads(written) == {"trigger": "sks", **json.loads(line)}


def test_the_trigger_word_is_where_the_caption_has_it():
    line = compact({"scene": "a photo of [trigger], {a|b}"})
    ((worded, _),) = variants_of([line], CaptionOptions(trigger="sks", shuffle=True))
    assert worded == line.replace("[trigger]", "sks")
    assert variants_of(["{a|b}"], CaptionOptions(wildcards=True)) == (("a", 0.5), ("b", 0.5))
    assert variants_of(["{}"], CaptionOptions(trigger="sks")) == (("sks, {}", 1.0),)  # of which digests are made


def test_templates_leave_objects_as_they_are(item):
    said = compact({"a": ", , {old}", "b": [1, 2]})
    wording = Wording(prompts=("?",), schema=Schema(document=SCENE), template="{old}, {folder}, {caption},")
    assert wording.caption_of(item, (), said) == f"photos, {said}"
    assert Wording(prompts=("?",), schema=Schema(document=SCENE)).caption_of(item, (), said) == said


@pytest.fixture
def item(bare):
    from prep.captioning.plan import survey
    from prep.progress import silent
    from prep.recipe.load import load_recipe

    items, _ = survey(load_recipe(bare, choices={}), jobs=1, progress=silent)
    return items[0].item


# ---- from the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCENE))
    return path


def call(server, source, schema, *options):
    return ("caption", source, "--endpoint", server.url, "--model", "tiny", "--jobs", 1, "--json-schema", schema,
            *options)


def texts(folder: Path):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.txt"))}


def test_captions_are_objects_on_one_line(prep, bare, schema):
    with ChatServer(lambda *_: f"```json\n{json.dumps(GOOD, indent=2)}\n```") as server:
        result = prep(*call(server, bare, schema))
        assert result.code == 0, result.err
        assert set(texts(bare.with_name("photos-edits")).values()) == {f"{compact(GOOD)}\n"}
        request = server.asked[0]
        assert request.document["response_format"] == {
            "type": "json_schema", "json_schema": {"name": "caption", "schema": SCENE}}
        assert request.prompt.startswith("Describe this image: ") and request.prompt.endswith(compact(SCENE))
        assert "4 made before" in prep(*call(server, bare, schema)).out and len(server.asked) == 3
        prep(*call(server, bare, schema, "--trigger", "sks", "--prompt", "of {folder}"))
        assert json.loads(texts(bare.with_name("photos-edits"))["0.txt"]) == {"trigger": "sks", **GOOD}
        assert "of photos Answer with one JSON object" in {request.prompt[:37] for request in server.asked}


def test_what_is_no_such_object_is_asked_again(prep, bare, schema):
    said = ["a cat", '{"scene": "a"}', Reply(body=completion('{"scene": "a', "length"))]
    with ChatServer(lambda request, before: said[before] if before < 3 else json.dumps(GOOD)) as server:
        result = prep(*call(server, bare, schema, "--concurrency", 1, "--json"))
        assert result.code == 1 and not bare.with_name("photos-edits").exists()
        details = {one["detail"] for one in result.json["findings"]}
        assert {one["code"] for one in result.json["findings"]} == {"not-captioned"} and details == {
            "the answer is not JSON: 'a cat'", "the answer has no 'subjects'",
            "the answer was cut off: raise --max-tokens"}
        again = prep(*call(server, bare, schema))
        assert again.code == 0 and "4 captions written, 3 answers asked for" in again.out


def test_without_a_schema_nothing_is_asked_for(prep, bare):
    with ChatServer() as server:
        prep("caption", bare, "--endpoint", server.url, "--model", "tiny")
    assert "response_format" not in server.asked[0].document and "JSON" not in server.asked[0].prompt


def test_a_schema_that_is_refused_ends_the_command(prep, bare, schema):
    schema.write_text("{}")
    result = prep("caption", bare, "--endpoint", "http://localhost:1", "--model", "m", "--json-schema", schema)
    assert result.code == 3 and "the schema has type None, expected" in result.err
