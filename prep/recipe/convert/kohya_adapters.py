"""Converts what sd-scripts trains: adapters by its modules, by LyCORIS, and by the types of its GUI, or all weights."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import Asked
from prep.recipe.convert.training import Training, number_of

_RANK, _ALPHA = 4, 1.0  # the defaults of sd-scripts
# Algorithms of LyCORIS, whose module sd-scripts loads, and of its GUI.
_LYCORIS: Mapping[str, str] = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr"}
_FILES_OF_FLOWS = ("ae", "clip_l", "clip_g", "t5xxl", "gemma2", "timestep_sampling", "discrete_flow_shift")
# Modules for flows, whose models have no convolutions to adapt, and all whose layers the preset kohya chooses.
_OF_FLOWS = ("networks.lora_flux", "networks.lora_sd3", "networks.lora_lumina", "networks.lora_krea2")
_PRODUCTS: Mapping[str, str] = {"networks.loha": "loha", "networks.lokr": "lokr"}
_ADAPTED = (None, "networks.lora", *_OF_FLOWS, *_PRODUCTS)
# The modules that its GUI takes for its types; of Standard for SD 3, networks.lora_sd3.
_MODULES: Mapping[str, str] = {"Flux1": "networks.lora_flux", "Lumina": "networks.lora_lumina",
                               "Kohya LoHa": "networks.loha", "Kohya LoKr": "networks.lokr"}
_CONVOLVED = ("Kohya LoCon", *(kind for kind, module in _MODULES.items() if module in _PRODUCTS))


def put_method(asked: Asked, training: Training) -> None:
    """Converts the method, and of an adapter its kind, rank, alpha and layers."""
    module = module_of(asked)
    lora = module is not None or asked.has("network_dim") or asked.has("LoRA_type")
    training.put("method", "lora" if lora else "full", "network_module")
    if module not in (*_ADAPTED, "lycoris.kohya"):
        training.note("network_module", module, "no such adapter here; lora is written")
    rank, alpha = number_of(asked.any("network_dim")), number_of(asked.any("network_alpha"))
    kind = str(asked.any("LoRA_type") or "Standard")  # of the GUI
    if module is None and kind not in ("Standard", "Kohya LoCon") and _algorithm(kind) is None:
        training.note("LoRA_type", kind, "no such adapter here; lora is written")
    if lora:
        training.put("lora.rank", int(rank or _RANK), "network_dim")
        training.put("lora.alpha", float(_ALPHA if alpha is None else alpha or rank or _RANK), "network_alpha")
        _convolutions(asked, training)


def module_of(asked: Asked) -> str | None:
    """sd-scripts' network_module, also of a configuration of the GUI, which has a type instead."""
    kind, module = asked.any("LoRA_type"), asked.any("network_module")
    return _MODULES.get(str(kind)) if module is None else str(module)


def is_flow(asked: Asked) -> bool:
    """Whether the configuration is for a flow. The GUI has the settings of flows for every model, and says itself."""
    boxes = [asked.any(name) for name in ("flux1_checkbox", "sd3_checkbox")]
    if module_of(asked) in _OF_FLOWS or True in boxes:
        return True
    return False not in boxes and any(asked.layers[0].table.get(name) for name in _FILES_OF_FLOWS)


def _convolutions(asked: Asked, training: Training) -> None:
    """Without conv_dim, sd-scripts adapts linear layers and 1x1 convolutions: also a UNet's proj_in and proj_out, and
    a flow's modulation. With it, it adapts a UNet's resnets as well, with an alpha of 1 if none is given."""
    args = _network_args(asked)
    if _lycoris(asked, args, training):
        return
    standard = asked.any("LoRA_type") not in _CONVOLVED  # the GUI has conv_dim also where it is not used
    given = {name: args.pop(name, None if standard else asked.any(name)) for name in ("conv_dim", "conv_alpha")}
    rank, alpha = (number_of(given[name]) for name in ("conv_dim", "conv_alpha"))
    module = module_of(asked)
    unets = (None, "networks.lora", *_PRODUCTS)  # also of flows; of the others, unknown ones are flows
    if rank and (is_flow(asked) or module not in unets):
        whose = f"models of {module}" if module not in unets else "flows"
        training.note("network_args conv_dim", rank, f"{whose} have no convolutions to adapt; not written")
        rank = None
    plain = "kohya" if module in _ADAPTED else "all-linear"  # which every family of models has
    training.put("lora.targets", "kohya-conv" if rank else plain, "network_module")
    if rank:
        training.put("lora.conv_rank", int(rank), "network_args conv_dim")
        training.put("lora.conv_alpha", _ALPHA if alpha is None else alpha or rank, "network_args conv_alpha")
    if module is not None and module in _PRODUCTS:
        training.put("lora.kind", _PRODUCTS[module], "network_module")
        _factor(asked, args, training)
    _note_args(args, training)


def _factor(asked: Asked, args: dict[str, str], training: Training) -> None:
    factor = number_of(args.pop("factor", asked.any("factor")))
    if training.settings["lora.kind"] == "lokr" and factor and factor > 0:
        training.put("lora.factor", int(factor), "network_args factor")


def _network_args(asked: Asked) -> dict[str, str]:
    words = asked.any("network_args")
    listed = words if isinstance(words, list) else str(words or "").split()
    return {name: value for name, _, value in (str(word).partition("=") for word in listed)}


def _note_args(args: Mapping[str, str], training: Training) -> None:
    for name, value in args.items():
        training.note(f"network_args {name}", value, "no counterpart")


def _algorithm(kind: str) -> str | None:
    """Of a type of the GUI like LyCORIS/LoHa."""
    tool, _, name = kind.partition("/")
    return _LYCORIS.get(name.lower()) if tool == "LyCORIS" else None


def _lycoris(asked: Asked, args: dict[str, str], training: Training) -> bool:
    """Converts LyCORIS' algorithm, factor and DoRA, if it is used. It adapts the resnets, too, with the rank and alpha
    of the other layers unless they have their own (lycoris/kohya/__init__.py)."""
    of_gui = _algorithm(str(asked.any("LoRA_type") or ""))
    if asked.any("network_module") != "lycoris.kohya" and of_gui is None:
        return False
    named = args.pop("algo", of_gui or "lora")
    if named.lower() not in _LYCORIS:
        training.note("network_args algo", named, "no such adapter here; lora is written")
    kind = _LYCORIS.get(named.lower(), "lora")
    training.put("lora.kind", kind, "network_args algo")
    _lycoris_layers(asked, args, training)
    _factor(asked, args, training)
    if str(args.pop("dora_wd", asked.any("dora_wd"))).lower() == "true":
        if kind == "lora":
            training.put("lora.dora", True, "network_args dora_wd")
        else:
            training.note("network_args dora_wd", True, f"lora.dora is only for lora.kind 'lora', and this is {kind}")
    _note_args(args, training)
    return True


def _lycoris_layers(asked: Asked, args: dict[str, str], training: Training) -> None:
    """Converts which layers LyCORIS adapts. Of a flow, which has no resnets, it adapts the linear layers of blocks."""
    flow = is_flow(asked)
    training.put("lora.targets", "kohya" if flow else "kohya-conv", "network_module")
    given = {name: number_of(args.pop(name, asked.any(name))) for name in ("conv_dim", "conv_alpha")}
    if flow:
        for name, value in given.items():
            if value:
                training.note(f"network_args {name}", value, "flows have no convolutions to adapt; not written")
    elif any(given.values()):  # each without the other is that of the other layers
        rank, alpha = (training.settings.get(f"lora.{name}") for name in ("rank", "alpha"))
        for name, value in (("rank", given["conv_dim"] or rank), ("alpha", given["conv_alpha"] or alpha)):
            if value is not None:
                training.put(f"lora.conv_{name}", int(value) if name == "rank" else value,
                             f"network_args conv_{'dim' if name == 'rank' else name}")
    if flow:
        training.note("network_module", asked.any("network_module") or asked.any("LoRA_type"), "written as "
                      'lora.targets = "kohya", every linear layer of the blocks: kohya-conv is for models with resnets')
