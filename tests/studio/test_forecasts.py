"""What a command would take: the question of a form, the answer of the command, and what the form's page shows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viewing import Viewing, studio_here

from prep.cli.forms import step_forms
from prep.errors import UsageError
from prep.studio.forecasts import Forecasts, answer_of, question_of

FORMS = step_forms()
BY_NAME = {form.name: form for form in FORMS}
PATIENCE = 60.0  # seconds, on a busy machine
MIB = 1 << 20
ASKED = "/form/prep-encode?source=missing"


def encode(**changed: Any) -> dict[str, Any]:
    memory = {"free": 100 * MIB, "text": 7 * MIB, "latent": 9 * MIB, "batch_size": 4, "largest_batch": 40,
              "embedding": 3 * MIB}
    return {"format": "latentry/encode", "encoded": {"latent": 1200, "mask": 0, "text": 3},
            "reused": {"latent": 5, "mask": 0, "text": 0}, "rejected": [{}, {}],
            "estimate": {"fields": {"latent": {"bytes": MIB}, "text": {"bytes": 2 * MIB}}, "weights": 5,
                         "memory": memory, "measured": None} | changed}


def check(**changed: Any) -> dict[str, Any]:
    memory = {"device": "cuda", "parts": {"weights": 6 * MIB, "average": 0}, "peak": 8 * MIB, "total": 10 * MIB,
              "free": 4 * MIB, "fits": False, "ways": [{"settings": {"batch_size": 1, "offload": True},
                                                        "peak": 3 * MIB, "fits": True}]}
    return {"format": "latentry/check", "faults": [], "steps_per_epoch": 8, "memory": memory,
            "notes": ["a note"]} | changed


def test_encode_says_memory_rows_and_bytes() -> None:
    answer = answer_of(json.dumps(encode()), "", 0)
    assert (answer.tone, answer.says) == (
        "good", "Encoding takes 9.0 MiB, and fits in the 100.0 MiB that are free.")
    facts = dict(answer.facts)
    assert facts["latents"] == "1,200 to encode, 5 in the cache"
    assert (facts["size of new rows"], facts["pictures left out"]) == ("3.0 MiB", "2")
    assert facts["memory of the VAE"] == "9.0 MiB, for 4 pictures at a time; 40 would fit"
    assert facts["memory of the vision model"] == "3.0 MiB" and "time" not in facts
    measured = answer_of(json.dumps(encode(measured={"seconds": 3700.0, "memory": None, "rows": {}})), "", 0)
    assert dict(measured.facts)["time"] == "about 1:01:40"


def test_what_does_not_fit_is_an_error_and_what_is_unknown_is_neither() -> None:
    memory = encode()["estimate"]["memory"]
    full = answer_of(json.dumps(encode(memory=memory | {"free": MIB})), "", 0)
    assert (full.tone, full.says) == ("error", "Encoding takes 9.0 MiB, and does not fit in the 1.0 MiB that are free.")
    unknown = answer_of(json.dumps(encode(memory=memory | {"free": None})), "", 0)
    assert (unknown.tone, unknown.says) == ("info", "Encoding takes 9.0 MiB.")
    assert "cannot be counted" in answer_of(json.dumps(encode(memory=None)), "", 0).says
    nothing = encode(memory=None) | {"encoded": {"latent": 0}}
    assert answer_of(json.dumps(nothing), "", 0).says == "Encoding takes no encoder: the cache has all rows."


def test_check_says_parts_and_the_settings_that_would_fit() -> None:
    answer = answer_of(json.dumps(check()), "", 0)
    assert answer.says == "Training takes 8.0 MiB at its peak, and does not fit in the 4.0 MiB that are free."
    assert dict(answer.facts) == {"steps of an epoch": "8", "memory of weights": "6.0 MiB",
                                  "memory of the GPU": "10.0 MiB"}
    assert answer.ways == (("3.0 MiB, which fits", {"batch_size": 1, "offload": True}),)
    assert answer.hints == ("a note",)
    refused = answer_of(json.dumps(check(memory=None, faults=[{"what": "no model", "hint": "name one"}])), "", 1)
    assert (refused.says, refused.hints) == ("The run cannot begin.", ("no model; name one",))
    assert "cannot be estimated" in answer_of(json.dumps(check(memory=None)), "", 0).says


@pytest.mark.parametrize("out", ["", "[]", "{}", "[" * 99999, '{"format": "latentry/encode"}', '{"format": "x"}'])
def test_command_without_an_answer_is_told(out: str) -> None:
    answer = answer_of(out, "x" * 9000 + "\nkilled\n", 137)
    assert (answer.tone, answer.says) == ("error", "The command ended with 137, and without an answer.")
    assert answer.hints[0].endswith("killed")
    assert len(answer.hints[0]) <= 2000


def test_question_has_the_values_that_the_command_takes() -> None:
    asked = question_of(BY_NAME["train-check"], {"manifest": ["-m.json"], "steps": ["5"], "unknown": ["x"]})
    assert asked == ["train", "check", "--steps", "5", "--", "-m.json"]
    assert question_of(BY_NAME["prep-encode"], {"source": ["a b"], "dry_run": ["no"]}) == [
        "prep", "encode", "a b", "--dry-run"]
    with pytest.raises(UsageError, match="still to be filled: source"):
        question_of(BY_NAME["prep-encode"], {})


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Viewing]:
    with studio_here(tmp_path, FORMS) as running:
        yield running


def wait_for(running: Viewing, words: str) -> str:
    deadline = time.monotonic() + PATIENCE
    while words not in (page := running.get(ASKED).text):
        assert time.monotonic() < deadline, page
        time.sleep(0.1)
    return page


def test_page_shows_the_answer_and_whose_it_is(studio: Viewing, tmp_path: Path) -> None:
    assert 'data-every="0"' in studio.get(ASKED).text
    assert studio.post("/forecast/prep-encode?source=missing").status == 200
    assert "This is of other values" not in wait_for(studio, "source missing does not exist")
    other = studio.get("/form/prep-encode?source=other").text
    assert "This is of other values: <code>prep encode missing --dry-run</code>" in other
    assert studio.post("/forecast/prep-encode?source=").status == 409
    for nowhere in ("/forecast/prep-scan?source=a", "/forecast/x"):
        assert studio.post(nowhere).status == 404
    assert not (tmp_path / "jobs").exists()  # it is none
    studio.post("/forecast/prep-encode/forget")
    assert "does not exist" not in studio.get(ASKED).text


def test_settings_that_would_fit_are_a_link_to_the_form(studio: Viewing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.studio.forecasts.answer_of", lambda *_: answer_of(json.dumps(check()), "", 0))
    studio.post("/forecast/train-run?manifest=m.json&settings=offload%3Dfalse&settings=seed%3D1")
    address = "/form/train-run?manifest=m.json&settings=offload%3Dfalse&settings=seed%3D1"
    deadline = time.monotonic() + PATIENCE
    while "which fits" not in (page := studio.get(address).text):
        assert time.monotonic() < deadline, page
        time.sleep(0.1)
    assert ("/form/train-run?manifest=m.json&amp;settings=seed%3D1&amp;settings=offload%3Dtrue&amp;batch_size=1\">"
            "batch_size = 1, offload = true</a>") in page


def test_one_question_replaces_another_and_ends_its_command(tmp_path: Path) -> None:
    forecasts = Forecasts(tmp_path)
    children = []
    for _ in range(2):
        forecasts.ask("prep-encode", ["prep", "codes"])
        children.append(forecasts.of("prep-encode"))
    forecasts.close()
    assert forecasts.of("prep-encode") is None
    for asked in children:
        assert asked is not None
        assert asked.child.wait(PATIENCE) != 0  # killed before it could begin
