"""Adapters whose tensors do not belong together, told by their names and shapes alone."""

from __future__ import annotations

import pytest

from prep.models.lora.kohya import Kohya, fused
from prep.parse import Unparsed
from train.models.adapters.stored import check_shapes, contents_of, table_of
from train.models.naming import Naming

LAYERS = {"a.to_q": (4, 6), "a.to_k": (4, 6), "a.to_v": (4, 6), "b.out": (4, 6), "c": (4, 6, 3, 3), "norm": (4,)}
NAMING = Naming(component="transformer", kohya=Kohya(rules=fused("(a)", "to_q to_k to_v", "{}.qkv")))
LORA = {"b.out.lora_down.weight": (2, 6), "b.out.lora_up.weight": (4, 2)}
LOHA = {f"b.out.hada_w{number}_{side}": shape for number in (1, 2) for side, shape in (("a", (4, 2)), ("b", (2, 6)))}
TUCKER = {"c.lora_down.weight": (2, 6, 1, 1), "c.lora_up.weight": (4, 2, 1, 1), "c.lora_mid.weight": (2, 2, 3, 3)}
LOKR = {"b.out.lokr_w1": (2, 2), "b.out.lokr_w2": (2, 3)}
GLORA = {"c.a1.weight": (6, 2, 1, 1), "c.a2.weight": (2, 6, 1, 1), "c.b1.weight": (4, 2, 1, 1),
         "c.b2.weight": (2, 6, 3, 3)}
IA3 = {"b.out.weight": (6,), "b.out.on_input": ()}


def check(shapes):
    for adapter in contents_of(shapes, table_of(LAYERS, NAMING)).adapters:
        check_shapes(adapter, shapes, LAYERS)


@pytest.mark.parametrize("shapes", [LORA, LOHA, LOKR, {**LORA, "b.out.dora_scale": (4, 1), "b.out.alpha": ()}, TUCKER,
                                    {"b.out.diff": (4, 6), "b.out.diff_b": (4,)}, {"norm.w_norm": (4,)},
                                    {**LORA, "b.out.diff_b": (4,)}, {"a.qkv.diff_b": (12,)}, GLORA,
                                    {**GLORA, "c.alpha": ()}, IA3, {**IA3, "b.out.weight": (1, 4, 1, 1)},
                                    {"a.qkv.weight": (12,), "a.qkv.on_input": (1,)}])
def test_whole_adapters_fit(shapes):
    check(shapes)


@pytest.mark.parametrize(("shapes", "said"), [
    ({"b.out.lora_down.weight": (2, 6)}, "it has no tensor 'up' of b.out"),
    ({"b.out.lora_up.weight": (4, 2)}, "it has no tensor 'down' of b.out"),
    ({"b.out.alpha": ()}, "it has no tensor 'down' of b.out"),
    ({**LORA, "b.out.lora_up.weight": (3, 2)}, "it has 'up' of b.out with shape [3, 2], expected [4, 2]"),
    ({**LORA, "b.out.lora_down.weight": (2, 5)}, "it has 'down' of b.out with shape [2, 5], expected [2, 6]"),
    ({**LORA, "b.out.dora_scale": (3, 1)}, "it has 'b.out.dora_scale' with shape [3, 1], expected [4, 1]"),
    ({**TUCKER, "c.lora_mid.weight": (2, 2, 5, 5)}, "it has 'mid' of c with shape [2, 2, 5, 5], expected [2, 2, 3, 3]"),
    ({**LOKR, "b.out.lokr_t2": (2, 2)}, "it has 'b.out.lokr_t2' beside 'b.out.lokr_w2', expected one of them"),
    ({**LOHA, "b.out.hada_t1": (3, 3)}, "it has 'b.out.hada_t1' and others that do not make a weight of shape [4, 6]"),
    ({"b.out.diff": (4, 5)}, "it has 'b.out.diff' with shape [4, 5], expected [4, 6]"),
    ({"b.out.diff_b": (6,)}, "it has 'b.out.diff_b' with shape [6], expected [4]"),
    ({**LORA, "b.out.diff": (4, 6)}, "it has 'b.out.diff' beside a LoRA of the same layer"),
    ({"b.out.diff": (4, 6), "b.out.dora_scale": (4, 1)},
     "it has 'b.out.dora_scale' beside a difference of the same layer"),
    ({"norm.lora_down.weight": (2,), "norm.lora_up.weight": (4, 2)}, "it has a LoRA of norm, which is a norm"),
    ({**LORA, **LOHA}, "it has 'b.out.lora_down.weight' beside a LoHa of the same layer"),
    ({**LORA, **LOKR}, "it has 'b.out.lora_down.weight' beside a LoKr of the same layer"),
    ({**LOKR, "b.out.lokr_w1_a": (2, 1), "b.out.lokr_w1_b": (1, 2)},
     "it has 'b.out.lokr_w1_a' beside 'b.out.lokr_w1', expected one of them"),
    ({name: shape for name, shape in GLORA.items() if "b2" not in name}, "it has no tensor 'glora_b2' of c"),
    ({**GLORA, "c.a1.weight": (2, 6, 1, 1)}, "it has 'glora_a1' of c with shape [2, 6, 1, 1], expected [6, 2, 1, 1]"),
    ({**GLORA, "c.dora_scale": (4, 1, 1, 1)}, "it has 'c.dora_scale' beside a GLoRA of the same layer"),
    ({**IA3, "b.out.weight": (5,)}, "it has 'b.out.weight' with shape [5], expected 4 or 6 numbers"),
    ({**IA3, "b.out.weight": (2, 3)}, "it has 'b.out.weight' with shape [2, 3], expected 4 or 6 numbers"),
    ({**IA3, "b.out.weight": ()}, "it has 'b.out.weight' with shape [], expected 4 or 6 numbers"),
    ({**IA3, "b.out.on_input": (2,)}, "it has 'b.out.on_input' with shape [2], expected one number"),
    ({**IA3, "b.out.alpha": ()}, "it has 'b.out.alpha' beside a set of IA3 factors of the same layer"),
    ({"b.out.on_input": ()}, "it has no tensor 'ia3' of b.out"),
    ({"b.out.weight": (4, 6)}, "it has the tensor 'b.out.weight', expected names of a LoRA of this model, like "
                               "'lora_unet_a_qkv.lora_down.weight'"),
    ({"norm.weight": (4,), "norm.on_input": ()}, "it has a set of IA3 factors of norm, which is a norm"),
    ({**LOHA, **LOKR}, "it has 'b.out.lokr_w1' beside a LoHa of the same layer"),
    ({"a.qkv.lora_A.weight": (2, 6), "a.qkv.lora_B.weight": (12, 2), "a.to_k.lora_A.weight": (2, 6)},
     "it adapts 'a.to_k' twice, as 'a.qkv' and as 'a.to_k'"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_tensors_that_do_not_belong_together(shapes, said):
    with pytest.raises(Unparsed) as caught:
        check(shapes)
    assert str(caught.value) == said
