"""Converts what sd-scripts trains: adapters by its modules, by LyCORIS, and by the types of its GUI, or all weights."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.kohya.family import MODULES, is_flow, module_of
from prep.recipe.convert.kohya.optimizer import arguments
from prep.recipe.convert.training import WHOLE, Training, number_of

_RANK, _ALPHA = 4, 1.0  # the defaults of sd-scripts
# Algorithms of LyCORIS, whose module sd-scripts loads, and of its GUI.
_LYCORIS: Mapping[str, str] = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr"}
# Modules for flows, whose models have no convolutions to adapt, and all whose layers the preset kohya chooses.
_OF_FLOWS = ("networks.lora_flux", "networks.lora_sd3", "networks.lora_lumina", "networks.lora_krea2",
             "networks.lora_anima")
_PRODUCTS: Mapping[str, str] = {"networks.loha": "loha", "networks.lokr": "lokr"}
_ADAPTED = (None, "networks.lora", *_OF_FLOWS, *_PRODUCTS)
_CONVOLVED = ("Kohya LoCon", *(kind for kind, module in MODULES.items() if module in _PRODUCTS))


def put_method(config: ToolConfig, training: Training) -> None:
    """Converts the method, and an adapter's kind, rank, alpha and layers."""
    module = module_of(config)
    words = config.any("token_string")
    lora = bool(module is not None or config.has("network_dim") or config.has("LoRA_type") or words)
    training.put("method", "lora" if lora else "full", "network_module")
    if words:
        training.note("token_string", words, "no textual inversion here, which trains a word's embedding; lora is "
                      "written")
    if module not in (*_ADAPTED, "lycoris.kohya"):
        training.note("network_module", module, "no such adapter here; lora is written")
    rank, alpha = number_of(config.any("network_dim")), number_of(config.any("network_alpha"))
    kind = str(config.any("LoRA_type") or "Standard")  # of the GUI
    if module is None and kind not in ("Standard", "Kohya LoCon") and _algorithm(kind) is None:
        training.note("LoRA_type", kind, "no such adapter here; lora is written")
    if lora:
        args = _network_args(config)
        kind = _kind(config, args)
        if kind == "lokr" and args.get("full_matrix", "").lower() == "true":
            rank = WHOLE
            training.note("network_args full_matrix", args.pop("full_matrix"), f"written as a rank of {WHOLE}")
            args |= {"conv_dim": str(rank)} if "conv_dim" in args else {}
        training.put_rank("lora.rank", int(rank or _RANK), "network_dim", kind)
        alpha = _ALPHA if alpha is None else alpha or rank or _RANK
        training.put_nearest("lora.alpha", float(alpha), "network_alpha")
        _convolutions(config, args, training)


def _kind(config: ToolConfig, args: Mapping[str, str]) -> str:
    """The kind of adapter: that of the module, or of LyCORIS' algorithm; "" if there is none here."""
    of_gui = _algorithm(str(config.any("LoRA_type") or ""))
    if config.any("network_module") == "lycoris.kohya" or of_gui is not None:
        return _LYCORIS.get(args.get("algo", of_gui or "lora").lower(), "")
    return _PRODUCTS.get(module_of(config) or "", "lora")


def _convolutions(config: ToolConfig, args: dict[str, str], training: Training) -> None:
    """Without conv_dim, sd-scripts adapts linear layers and 1x1 convolutions: also a UNet's proj_in and proj_out, and
    a flow's modulation. With it, it adapts a UNet's resnets as well, with an alpha of 1 if none is given."""
    if _lycoris(config, args, training):
        return
    standard = config.any("LoRA_type") not in _CONVOLVED  # the GUI has conv_dim also where it is not used
    values = {name: args.pop(name, None if standard else config.any(name)) for name in ("conv_dim", "conv_alpha")}
    rank, alpha = (number_of(values[name]) for name in ("conv_dim", "conv_alpha"))
    module = module_of(config)
    unets = (None, "networks.lora", *_PRODUCTS)  # also of flows; of the others, unknown ones are flows
    if rank and (is_flow(config) or module not in unets):
        whose = f"models of {module}" if module not in unets else "flows"
        training.note("network_args conv_dim", rank, f"{whose} have no convolutions to adapt; not written")
        rank = None
    plain = "kohya" if module in _ADAPTED else "all-linear"  # which every family of models has
    training.put("lora.targets", "kohya-conv" if rank else plain, "network_module")
    if rank:
        training.put_rank("lora.conv_rank", int(rank), "network_args conv_dim", _kind(config, args))
        training.put_nearest("lora.conv_alpha", _ALPHA if alpha is None else alpha or rank, "network_args conv_alpha")
    if module is not None and module in _PRODUCTS:
        training.put("lora.kind", _PRODUCTS[module], "network_module")
        _factor(config, args, training)
    _note_args(args, training)


def _factor(config: ToolConfig, args: dict[str, str], training: Training) -> None:
    factor = number_of(args.pop("factor", config.any("factor")))
    if training.settings["lora.kind"] == "lokr" and factor and factor > 0:
        training.put_nearest("lora.factor", int(factor), "network_args factor")


def _network_args(config: ToolConfig) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in arguments(config, "network_args"))}


def _note_args(args: Mapping[str, str], training: Training) -> None:
    for name, value in args.items():
        training.note(f"network_args {name}", value, "no counterpart")


def _algorithm(kind: str) -> str | None:
    """The algorithm in a type of the GUI like LyCORIS/LoHa."""
    tool, _, name = kind.partition("/")
    return _LYCORIS.get(name.lower()) if tool == "LyCORIS" else None


def _lycoris(config: ToolConfig, args: dict[str, str], training: Training) -> bool:
    """Converts LyCORIS' algorithm, factor and DoRA, if it is used. It adapts the resnets, too, with the rank and alpha
    of the other layers unless they have their own (lycoris/kohya/__init__.py)."""
    of_gui = _algorithm(str(config.any("LoRA_type") or ""))
    if config.any("network_module") != "lycoris.kohya" and of_gui is None:
        return False
    named = args.pop("algo", of_gui or "lora")
    if named.lower() not in _LYCORIS:
        training.note("network_args algo", named, "no such adapter here; lora is written")
    kind = _LYCORIS.get(named.lower(), "lora")
    training.put("lora.kind", kind, "network_args algo")
    _lycoris_layers(config, args, training)
    _factor(config, args, training)
    if str(args.pop("dora_wd", config.any("dora_wd"))).lower() == "true":
        if kind == "lora":
            training.put("lora.dora", True, "network_args dora_wd")
        else:
            training.note("network_args dora_wd", True, f"lora.dora is only for lora.kind 'lora', and this is {kind}")
    _note_args(args, training)
    return True


def _lycoris_layers(config: ToolConfig, args: dict[str, str], training: Training) -> None:
    """Converts which layers LyCORIS adapts. Of a flow, which has no resnets, it adapts the linear layers of blocks."""
    flow = is_flow(config)
    training.put("lora.targets", "kohya" if flow else "kohya-conv", "network_module")
    values = {name: number_of(args.pop(name, config.any(name))) for name in ("conv_dim", "conv_alpha")}
    if flow:
        for name, value in values.items():
            if value:
                training.note(f"network_args {name}", value, "flows have no convolutions to adapt; not written")
    elif any(values.values()):  # each without the other is that of the other layers
        rank, alpha = (training.settings.get(f"lora.{name}") for name in ("rank", "alpha"))
        if own := values["conv_dim"] or rank:
            training.put_rank("lora.conv_rank", int(own), "network_args conv_dim", str(training.settings["lora.kind"]))
        if scale := values["conv_alpha"] or alpha:
            training.put_nearest("lora.conv_alpha", float(scale), "network_args conv_alpha")
    if flow:
        training.note("network_module", config.any("network_module") or config.any("LoRA_type"), "written as "
                      'lora.targets = "kohya", every linear layer of the blocks: kohya-conv is for models with resnets')
