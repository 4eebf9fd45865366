"""Loads the settings of a run: `train.toml` and command options to a frozen record with every value filled in.

Unknown keys are errors with a suggestion; the error for a value out of range has key, value and expected range.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, fields, replace
from math import gcd
from pathlib import Path
from typing import Any

from prep.errors import ConfigError
from prep.fs.place import require_local
from prep.fs.text import TooLarge, parse_toml, read_text
from prep.models.named import beside, without_folders
from prep.parse import BRIEF, Unparsed, brief, expect, known_keys
from prep.setting import line_check
from prep.training.optimizers import DEPENDENT, OPTIMIZERS, usual
from prep.training.schema import STEPS, Base, Config, Evaluating, Lora, Optimizer
from prep.training.table import SECTIONS, SETTINGS
from train.config import hints
from train.config.aliases import advice

_INSTEAD = {"steps": "epochs", "epochs": "steps"}
MOST = 1 << 20  # bytes of a file of settings


class _Refused(Unparsed):
    """A setting does not take its value."""

    def __init__(self, text: str, name: str, value: Any) -> None:
        super().__init__(text)
        self.name, self.value = name, value


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None, start: Mapping[str, Any] | None = None,
                ) -> Config:
    """The settings in the file at `path`, or of `start`, changed by `overrides` (`{"lora.rank": 8}`).

    Raises `ConfigError`, and `PathError` for a file in a store.
    """
    table = copy.deepcopy(dict(start or {})) if path is None else _placed(_read(path), path.parent)
    for name, value in (overrides or {}).items():
        if name not in SETTINGS:
            _refuse(name, value)
        _put(table, name, _FOUND[name](value, Path()) if name in _FOUND else value)
        if name in _INSTEAD and _INSTEAD[name] not in (overrides or {}):
            table.pop(_INSTEAD[name], None)  # an option in steps replaces the file's epochs, and the reverse
    return parse(table, "the options" if path is None else str(path), overrides or ())


def _placed(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a file in `folder`, with what they name as it is found from there."""
    for name, found in _FOUND.items():
        section, _, key = name.partition(".")
        if isinstance(inner := table.get(section), dict) and key in inner:
            inner[key] = found(inner[key], folder)
    return table


def _located(value: Any, folder: Path) -> Any:
    """The path of a file, if it is one, made absolute: it begins at `folder`."""
    return str((folder / value).absolute()) if isinstance(value, str) and value else value


def _model_located(value: Any, folder: Path) -> Any:
    """The name of a model, with the paths in it made absolute: they begin at `folder`."""
    return beside(value, folder.absolute()) if isinstance(value, str) else value


# The settings that name a file or a model, and how these are found from the directory of the file of settings.
_FOUND: Mapping[str, Callable[[Any, Path], Any]] = {
    "base.adapter": _located, "sample.model": _model_located, "evaluate.neutral": _located,
    "evaluate.embed": _model_located}


def published(config: Config) -> Config:
    """The settings as results say them: without a path of this computer."""
    return replace(config, base=replace(config.base, adapter=Path(config.base.adapter).name),
                   sample=replace(config.sample, model=without_folders(config.sample.model)),
                   evaluate=replace(config.evaluate, neutral=Path(config.evaluate.neutral).name,
                                    embed=without_folders(config.evaluate.embed)))


def on_trained(config: Config) -> Config:
    """The settings without files and models beside the trained one, which need no longer be there."""
    return replace(config, base=Base(), sample=replace(config.sample, model=""), evaluate=Evaluating())


def _refuse(name: str, value: Any) -> None:
    """Raises `ConfigError`, which does not blame the file, for an option that is no setting."""
    if name in SECTIONS:
        known = [setting for setting in SETTINGS if setting.startswith(f"{name}.")]
        raise ConfigError(f"{name} is {brief(value)}, but it is a section, expected one of its settings: "
                          f"{', '.join(known)}", hint=hints.of_name(name, value))
    alone: dict[str, Any] = {}
    _put(alone, name, value)
    try:
        parse(alone, "the options")
    except ConfigError as error:
        error.hint = hints.of_name(name, value)
        raise


def parse(table: Mapping[str, Any], where: str, options: Container[str] = ()) -> Config:
    """The settings in `table`, which was read from TOML; those among `options` were given on the command line.

    Raises `ConfigError` with `where` in its message.
    """
    try:
        return _together(_build(Config, table, where, ""))
    except _Refused as error:
        raise ConfigError(str(error), hint=hints.of_value(error.name, error.value, option=error.name in options)
                          ) from None
    except Unparsed as error:
        raise ConfigError(str(error), hint=hints.MANY) from None


def as_table(config: Config) -> dict[str, Any]:
    """`config` as a nested dict of plain values; `parse` turns it back into `config`."""
    return {name: value for name, value in _plain(asdict(config)).items() if value is not None}


def by_name(config: Config) -> dict[str, Any]:
    """The values of `as_table` by the names of `SETTINGS`, as in `lora.rank`; lists are tuples, as defaults are."""
    flat: dict[str, Any] = {}
    for name, value in as_table(config).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flat.items()}


def option(text: str) -> tuple[str, Any]:
    """`("lora.rank", 8)` from `"lora.rank=8"`: a TOML value, or else a string; titles are strings always.

    Raises `ConfigError`.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set is {brief(text)}, expected NAME=VALUE", hint=hints.of_text(text))
    try:
        table = parse_toml(f"value = {value}", "--set")
    except ConfigError:
        return name, value
    line = name in SETTINGS and SETTINGS[name].spec.check is line_check and not isinstance(table["value"], str)
    return name, value if line or len(table) > 1 else table["value"]  # a text may look like a number


def parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """`[("lora.rank", 8)]` from `("lora", {"rank": 8})`: the settings of a section that is given as a whole."""
    if name in SECTIONS and isinstance(value, dict):
        return [(f"{name}.{key}", inner) for key, inner in value.items()]
    return [(name, value)]


def _read(path: Path) -> dict[str, Any]:
    require_local(path, "settings file")
    try:
        table = parse_toml(read_text(path, most=MOST), str(path), hint=hints.MANY)
    except TooLarge:
        raise ConfigError(f"{path} is larger than {MOST} bytes, expected a file of settings",
                          hint=hints.MANY) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=f"{hints.MANY}; without -c all have "
                          "their defaults") from None
    except Unparsed as error:
        raise ConfigError(f"{path}: {error}", hint=hints.MANY) from None
    if "source" in table:
        raise ConfigError(f"{path} is a recipe, which prep reads, expected a file of settings", hint=hints.MANY)
    return table


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    section, dot, key = name.partition(".")
    if not dot:
        table[name] = value
        return
    inner = table.setdefault(section, {})
    if isinstance(inner, dict):  # `parse` reports anything else
        inner[key] = value


def _build(record: Any, table: Mapping[str, Any], where: str, prefix: str) -> Any:
    _known(record, table, f"[{prefix}] of {where}" if prefix else where)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if record is Config and name in SECTIONS:
            values[name] = _build(SECTIONS[name], expect(value, dict, f"[{name}] of {where}"), where, name)
        else:
            full = f"{prefix}.{name}" if prefix else name
            values[name] = _checked(full, value)
    if record is Config and "batch_size" in values:
        values.setdefault("micro_batch", values["batch_size"])
    if record is Optimizer:
        values = usual(values.get("name", "adamw")) | values
    if record is Lora:
        values = _with_ranks(values)
    return record(**values)


def _checked(name: str, value: Any) -> Any:
    """What the setting `name` is with `value`. Raises `_Refused`."""
    try:
        return SETTINGS[name].spec.check(value, name)
    except Unparsed as error:
        raise _Refused(str(error), name, value) from None


def _with_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of LoRA with those that follow from others: convolutions have the rank and alpha of the other layers,
    unless they have a rank."""
    if "rank" in values:
        values.setdefault("alpha", float(values["rank"]))
    if "conv_rank" in values:
        values.setdefault("conv_alpha", float(values["conv_rank"]))
    usually = Lora()
    return {"conv_rank": values.get("rank", usually.rank), "conv_alpha": values.get("alpha", usually.alpha), **values}


def _known(record: Any, table: Mapping[str, Any], where: str) -> None:
    """Raises `Unparsed` for the first unknown key; if it is a setting of another trainer, names ours."""
    names = [each.name for each in fields(record)]
    for key in table:
        if key not in names and (explanation := advice(key, SETTINGS, inside=record is not Config)):
            raise Unparsed(f"unknown key '{key[:BRIEF]}' in {where}{explanation}")
    known_keys(table, names, where)


def _together(config: Config) -> Config:
    """`config` with `steps` filled in. Raises `Unparsed` and `ConfigError` if its values contradict each other."""
    if config.steps is not None and config.epochs is not None:
        raise Unparsed(f"steps is {config.steps} and epochs is {config.epochs}, expected one of them")
    if config.batch_size % config.micro_batch:
        raise ConfigError(f"batch_size is {config.batch_size}, expected a multiple of micro_batch {config.micro_batch}",
                          hint=f"--micro-batch {gcd(config.batch_size, config.micro_batch)}, or another --batch-size")
    if config.timesteps.low >= config.timesteps.high:
        raise Unparsed(f"timesteps.low is {config.timesteps.low:g} and timesteps.high is {config.timesteps.high:g}, "
                       "expected a lower one first")
    if config.loss.min_snr and config.loss.weighting != "none":
        raise Unparsed(f"loss.min_snr is {config.loss.min_snr:g} and loss.weighting is '{config.loss.weighting}', "
                       "expected one of them")
    _check_optimizer(config)
    _check_layers(config.lora)
    if config.steps is None and config.epochs is None:
        return Config(**{each.name: getattr(config, each.name) for each in fields(config)} | {"steps": STEPS})
    return config


def _check_layers(lora: Lora) -> None:
    """Raises `Unparsed` for settings that contradict each other, and for alphas by layer in a format in which diffusers
    does not read them."""
    if lora.init == "pissa" and lora.dora:
        raise Unparsed("lora.init is 'pissa' and lora.dora is on, expected one of them")
    if lora.kind != "lora":
        _check_products(lora)
        return
    if lora.factor:
        raise Unparsed(f"lora.factor is {lora.factor}, expected 0 for lora.kind '{lora.kind}'")
    own = own_alphas(lora)
    if own and lora.format != "diffusers":
        raise Unparsed(f"lora.format is '{lora.format}', expected 'diffusers' where lora.layers gives '{own[0]}' "
                       f"an alpha of its own{', by lora.rslora' if lora.rslora else ''}: diffusers reads one alpha "
                       "from a file with kohya's names")


def own_alphas(lora: Lora) -> list[str]:
    """What matches the layers to which lora.layers gives an alpha of their own: diffusers reads one alpha from a file
    with kohya's names."""
    return [rule["match"] for rule in lora.layers if "alpha" in rule or (lora.rslora and "rank" in rule)]


def _check_products(lora: Lora) -> None:
    """Raises `Unparsed` for settings that LoHa and LoKr do not have."""
    for name in ("dora", "rslora", "dropout", "init", "format"):
        if getattr(lora, name) not in (getattr(Lora(), name), "kohya"):
            raise Unparsed(f"lora.{name} is {brief(getattr(lora, name))}, which is not for lora.kind "
                           f"'{lora.kind}', expected {brief(getattr(Lora(), name))}")
    wanted = lora.conv_rank * lora.alpha / lora.rank
    if abs(lora.conv_alpha - wanted) > 1e-6 * wanted:
        raise Unparsed(f"lora.conv_alpha is {lora.conv_alpha:g}, expected {wanted:g} for lora.kind '{lora.kind}': "
                       "alpha / rank is the same in all layers")
    if any("alpha" in rule for rule in lora.layers):
        raise Unparsed(f"lora.layers has an alpha, but with lora.kind '{lora.kind}' alpha / rank is the same in all "
                       "layers")


def _check_optimizer(config: Config) -> None:
    """Raises `Unparsed` for settings that the optimizer does not take, or that contradict it."""
    optimizer, default_optimizer = config.optimizer, Optimizer()
    if optimizer.name == "prodigy" and any("lr" in rule for rule in config.lora.layers):
        raise Unparsed("lora.layers has an lr, but 'prodigy' finds one learning rate for all layers")
    for name in DEPENDENT:
        value, default = getattr(optimizer, name), usual(optimizer.name).get(name, getattr(default_optimizer, name))
        if name not in OPTIMIZERS[optimizer.name].takes and value != default:
            raise Unparsed(f"optimizer.{name} is {brief(value)}, but '{optimizer.name}' has no such setting, expected "
                           f"{brief(default)}")
    if OPTIMIZERS[optimizer.name].first_beta and not optimizer.betas[0]:  # of which they keep something else
        raise Unparsed(f"optimizer.betas[0] is 0, expected more for '{optimizer.name}'")
    if optimizer.name == "adamw-schedule-free":
        if config.schedule.name != "constant":
            raise Unparsed(f"schedule.name is '{config.schedule.name}', expected 'constant' for 'adamw-schedule-free', "
                           "which averages the weights instead")
        if config.ema.snapshots:
            raise Unparsed("ema.snapshots is on, expected off for 'adamw-schedule-free', which averages the weights "
                           "itself")
        if config.ema.decay:
            raise Unparsed(f"ema.decay is {config.ema.decay:g}, expected 0 for 'adamw-schedule-free', which averages "
                           "the weights itself")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    return list(value) if isinstance(value, tuple) else value
