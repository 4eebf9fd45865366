"""Converts what ai-toolkit trains: an adapter by its `network`, or all weights without one.

For every transformer alpha is the rank, whatever the file has; only UNets use `linear_alpha` (toolkit/lora_special.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.aitoolkit.family import family_of, is_unet
from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.layers import BLOCKS, blocks_of
from prep.recipe.convert.training import WHOLE, Training, number_of

_RANK, _ALPHA = 4, 1.0  # ai-toolkit's defaults
_KINDS: Mapping[str, str] = {"lora": "lora", "locon": "lora", "dora": "lora", "lokr": "lokr"}
_FULL = "network.lokr_full_rank"


def put_method(network: ToolConfig | None, model: ToolConfig, training: Training) -> None:
    """Converts the method, and an adapter's kind, rank, alpha and layers."""
    training.put("method", "full" if network is None else "lora", "network")
    if network is None:
        return
    named = str(network.any("type") or "lora").lower()
    if named not in _KINDS:
        training.note("network.type", named, "no such adapter here; lora is written")
    kind = _KINDS.get(named, "lora")
    if kind != "lora":
        training.put("lora.kind", kind, "network.type")
    elif named == "dora":
        training.put("lora.dora", True, "network.type")
    whole = kind == "lokr" and network.any("lokr_full_rank") is not False
    rank = _rank(network, training, kind, whole=whole)
    _alpha(network, model, training, rank, whole=whole)
    _lokr(network, training, kind)
    if dropout := number_of(network.any("dropout")):
        training.put_nearest("lora.dropout", dropout, "network.dropout")
    _layers(network, model, training, whole=whole)


def _rank(network: ToolConfig, training: Training, kind: str, *, whole: bool) -> int:
    """Adds the rank: `rank` overrides `linear`, which is the same."""
    values = [number_of(network.any(name)) for name in ("rank", "linear")]
    rank = next((int(value) for value in values if value is not None), _RANK)
    if whole:
        training.put("lora.rank", WHOLE, _FULL)
        training.note(_FULL, True, f"written as a rank of {WHOLE}; ai-toolkit has whole LoKr matrices unless it is "
                      "false")
        return WHOLE
    training.put_rank("lora.rank", rank, "network.linear", kind)
    return int(training.settings.get("lora.rank", rank))


def _alpha(network: ToolConfig, model: ToolConfig, training: Training, rank: int, *, whole: bool) -> None:
    """Adds the alpha of linear layers: the rank, except of UNets."""
    given = [number_of(network.any(name)) for name in ("linear_alpha", "alpha")]
    alpha = next((value for value in given if value is not None), _ALPHA)
    if not is_unet(model) or whole:
        training.put("lora.alpha", float(rank), "network.linear_alpha")
        if alpha != rank and any(value is not None for value in given):
            why = "whole LoKr matrices" if whole else "transformers"
            training.note("network.linear_alpha", alpha, f"ai-toolkit ignores it for {why}, whose alpha is the rank; "
                          f"{rank:g} is written")
    else:
        training.put_nearest("lora.alpha", float(alpha), "network.linear_alpha")


def _lokr(network: ToolConfig, training: Training, kind: str) -> None:
    factor = number_of(network.any("lokr_factor"))
    if kind == "lokr" and factor and factor > 0:
        training.put_nearest("lora.factor", int(factor), "network.lokr_factor")
    network.any("old_lokr_format")  # of names in the file, which lora.format decides
    network.any("lokr_full_rank")


def _layers(network: ToolConfig, model: ToolConfig, training: Training, *, whole: bool) -> None:
    """Adds the layers: those of the blocks; of a UNet also around them, and with `conv` those of the resnets."""
    family, convolved = family_of(model), False
    if is_unet(model):
        convolved = _convolutions(network, training, whole=whole)
    else:
        for name in ("conv", "conv_alpha"):
            if value := network.any(name):
                training.note(f"network.{name}", value, "transformers have no convolutions in their blocks; not "
                              "written")
        if network.any("transformer_only") is False:
            training.note("network.transformer_only", False, "also adapts layers around the blocks: list them in "
                          'lora.targets, as in "re:embed"')
    targets = ("kohya-conv" if convolved else "kohya") if is_unet(model) else blocks_of(family)
    if is_unet(model) or targets == "all-linear":
        where = "" if is_unet(model) else " of the blocks"
        training.note("network", None, f"ai-toolkit adapts every linear layer and 1x1 convolution{where}: {targets} is "
                      "the nearest preset of lora.targets")
    words = _words(network, training)
    if any(words.values()) and family in BLOCKS and not convolved:
        targets = [_expression(BLOCKS[family], words)]
        training.note("network.network_kwargs", words, "written as an expression in lora.targets; train check says how "
                      "many layers it chooses")
    elif any(words.values()):
        training.note("network.network_kwargs", words, "not written: choose these layers in lora.targets by the names "
                      "that diffusers has for them")
    training.put("lora.targets", targets, "network")


def _convolutions(network: ToolConfig, training: Training, *, whole: bool) -> bool:
    """Adds the rank and alpha of convolutions larger than 1x1; whether they are adapted."""
    rank, alpha = (number_of(network.any(name)) for name in ("conv", "conv_alpha"))
    if rank and not whole:
        training.put_rank("lora.conv_rank", int(rank), "network.conv", str(training.settings.get("lora.kind", "lora")))
        training.put_nearest("lora.conv_alpha", float(rank if alpha is None else alpha), "network.conv_alpha")
    return bool(rank) or whole


def _words(network: ToolConfig, training: Training) -> dict[str, list[str]]:
    """The parts of layer names by which layers are chosen, and left out."""
    table: Any = network.any("network_kwargs")
    table = table if isinstance(table, dict) else {}
    for name, value in table.items():
        if value and name not in ("only_if_contains", "ignore_if_contains"):
            training.note(f"network.network_kwargs.{name}", value, "no counterpart")
    lists = {name: table.get(name) for name in ("only_if_contains", "ignore_if_contains")}
    return {name: [str(word) for word in value] if isinstance(value, list) else [str(value)] if value else []
            for name, value in lists.items()}


def _expression(blocks: str, words: Mapping[str, list[str]]) -> str:
    """An expression of the names of layers in `blocks`: with a word of the first list, and none of the second."""
    parts = [f"(?{mark}.*(?:{'|'.join(map(_word, listed))}))" for mark, listed in (
        ("=", words["only_if_contains"]), ("!", words["ignore_if_contains"])) if listed]
    return f"re:^{''.join(parts)}{blocks}"


def _word(word: str) -> str:
    """A part of a name, without the denoiser's, with which names begin there."""
    return re.escape(word.removeprefix("transformer.").removeprefix("unet."))
