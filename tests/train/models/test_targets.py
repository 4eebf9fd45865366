"""Which weights full fine-tuning trains."""

from __future__ import annotations

import pytest

from prep.errors import ConfigError
from prep.training.schema import Full
from train.models import targets
from train.models.targets import unfrozen

WEIGHTS = ["conv_in.weight", "down.0.attn1.to_q.weight", "down.0.attn1.to_out.0.bias", "down.0.attn10.to_q.weight",
           "up.0.attn1.to_q.weight"]


@pytest.mark.parametrize(("full", "wanted"), [
    (Full(), [0, 1, 2, 3, 4]), (Full(train=("attn1",)), [1, 2, 4]), (Full(train=("down",)), [1, 2, 3]),
    (Full(train=("attn1",), freeze=("up",)), [1, 2]), (Full(freeze=("to_out.0", "conv_in")), [1, 3, 4]),
    (Full(train=("re:^(up|conv)",)), [0, 4]), (Full(freeze=("re:weight$",)), [2]),
    (Full(train=("down.0.attn1.to_q.weight",)), [1]),
], ids=str)
def test_a_pattern_names_modules_with_all_inside_them(full, wanted):
    assert unfrozen(WEIGHTS, full) == [WEIGHTS[at] for at in wanted]


@pytest.mark.parametrize(("expression", "says"), [
    (r"((\w+?)\.?)+?((\w+)\.?)+\d{9}", r"takes more than 0.1 s to look for in 'down_blocks.0"),
    ("(a", "is no regular expression: missing )")])
def test_an_expression_without_an_end_is_refused(monkeypatch, expression, says):
    monkeypatch.setattr(targets, "PATIENCE", 0.1)
    names = ["conv_in.weight", "down_blocks.0.attentions.1.transformer_blocks.0.attn2.processor.to_q.weight"]
    with pytest.raises(ConfigError) as error:
        unfrozen(names, Full(train=(f"re:{expression}",)))
    assert says in error.value.message and "attn2.to_q" in error.value.hint
