"""Resumes a run: finds the checkpoint, and compares data, model and settings with those that it was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prep.errors import CacheError, ConfigError, ModelError, Problem
from prep.formatting import listed, shell_name
from prep.fs.place import Local, is_file
from prep.loader.identity import changes
from prep.training.schema import Config
from prep.training.table import SETTINGS
from train.config.load import as_table, parse
from train.models.adapters.frozen import PART
from train.models.targets import Adapter, adapter_of, layers_of, read_weights, targeted
from train.optim.optimizers import TABLE
from train.runs.checkpoint import MEANING, MEANINGS, State, find_checkpoint, read_state, way_out
from train.runs.directory import read_records, read_run
from train.setup import Setup

# A change of these would need tensors that the checkpoint lacks: even --adopt refuses it. So it is with lora.layers, if
# a layer's rank differs.
STRUCTURE = ("method", "lora.kind", "lora.factor", "lora.rank", "lora.conv_rank", "lora.targets", "lora.dora",
             "lora.init", "full.train", "full.freeze", "full.dtype", "ema.decay",
             "ema.snapshots", "optimizer.name")
# What a changed setting needs: nothing, --adopt, another run; or for layers, that the same ones share a learning rate.
_Needs = Literal["free", "adopt", "fixed", "groups"]
# Changes of these put the logged losses on another scale: those of training alone, or those of validation as well.
_WEIGHTS = ("loss.min_snr", "loss.weighting")
_ERRORS = ("loss.unmasked_weight", "loss.normalize_area", "loss.huber")
_FACTS = {"masked": "use of masks", "prediction": "prediction"}  # of the data
# The options of `train run` for settings that a checkpoint decides.
_FLAGS = {"method": "--method", "batch_size": "--batch-size", "underfill": "--underfill", "seed": "--seed",
          "precision": "--precision", "lora.rank": "--rank"}
_ADOPT = "add --adopt to accept the change and continue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint that a resumed run starts from; the sizes of its files are checked, their content is not yet."""

    run: Local
    folder: Path
    state: State
    config: Config  # the settings that it was trained with

    @property
    def planned(self) -> int:
        """The micro-batch with which the run's steps were planned."""
        return self.state.micro_batch or self.config.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeComparison:
    """Differences between a checkpoint and the run that is to resume from it."""

    faults: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()  # changes that are allowed
    adopted: tuple[str, ...] = ()  # changes that --adopt accepted


def find_start(run: Local, named: str | None = None, *, complete: bool = True) -> Start:
    """The newest checkpoint of `run`, or the checkpoint `named`; `complete` as in `read_state`.

    Raises `PathError` if there is none, `CacheError` if it is damaged.
    """
    folder = find_checkpoint(run, named)
    state = read_state(folder, complete=complete)
    try:
        config = parse(state.config, f"{folder.name}/state.json")
    except ConfigError as error:
        raise CacheError(f"{folder / 'state.json'}: {error.message}",
                         hint=f"another version of this program may have written it; {way_out(folder)}") from None
    return Start(run=run, folder=folder, state=state, config=config)


def compare(start: Start, setup: Setup, *, adopt: bool) -> ResumeComparison:
    """Compares `setup` with `start`: faults that prevent resuming, allowed changes, changes that `adopt` accepts."""
    old, new = _flat(as_table(start.config)), _flat(as_table(setup.config))
    differing = [name for name in SETTINGS if old.get(name) != new.get(name) and name != "loss.masked"]
    needs = {name: _needs(name, start, setup) for name in differing}
    free, others, fixed = ([name for name in differing if needs[name] == kind] for kind in ("free", "adopt", "fixed"))
    faults: list[Problem] = []
    if fixed:
        faults.append(_other_settings(fixed, old, new, "choose another RUN with -o"))
    if "groups" in needs.values():
        faults.append(_other_groups(old, new, setup.config))
    adoptable: list[tuple[str, Problem]] = list(_adoptable(start, setup))
    adoptable += [(_told(name, old, new), _other_settings([name], old, new, _ADOPT)) for name in others]
    if start.state.step > setup.steps:
        faults.append(ConfigError(f"{start.run} is already at step {start.state.step}, but the settings end at "
                                  f"step {setup.steps}",
                                  hint=f"--steps {start.state.step} or more, or another RUN with -o"))
    if not adopt:
        faults += [fault for _, fault in adoptable]
    notes = [f"{_noted(name, old, new)}{_consequence(name, start, setup)}" for name in free]
    notes += _taken_back(start, old, new)
    if adopt:
        notes += _rescaled(differing, start, setup)
    if start.state.version == 1:
        notes.append(f"{start.folder.name} is of version 1, which has no digests: damage in it cannot be detected")
    return ResumeComparison(faults=tuple(faults), notes=tuple(notes),
                            adopted=tuple(what for what, _ in adoptable) if adopt else ())


def _needs(name: str, start: Start, setup: Setup) -> _Needs:
    """What the changed setting `name` needs."""
    if name == "lora.layers":
        return _layers_need(start.config, setup)
    if name == "full.fused_backward":  # the same steps, unless gradients are clipped one by one
        return "adopt" if start.config.optimizer.clip or setup.config.optimizer.clip else "free"
    return "free" if SETTINGS[name].spec.resume else "fixed" if name in STRUCTURE else "adopt"


def _layers_need(before: Config, setup: Setup) -> _Needs:
    """What a changed lora.layers needs, by what it changes in each layer. The other settings count as they were: they
    are compared by themselves."""
    if setup.config.method != "lora" or before.method != "lora":
        return "free"
    layers = layers_of(read_weights(setup.model.path, setup.family))
    named = targeted(layers, setup.config.lora, setup.family.lora.presets)
    old, new = ([adapter_of(lora, name, layers[name][2:]) for name in named]
                for lora in (before.lora, replace(before.lora, layers=setup.config.lora.layers)))
    if [adapter.rank for adapter in old] != [adapter.rank for adapter in new]:
        return "fixed"
    if TABLE[before.optimizer.name].numbers and not _same_groups(old, new):
        return "groups"
    return "free" if [adapter.alpha for adapter in old] == [adapter.alpha for adapter in new] else "adopt"


def _same_groups(old: Sequence[Adapter], new: Sequence[Adapter]) -> bool:
    """Whether the layers that share a learning rate are the same ones."""
    pairs = {(before.lr, after.lr) for before, after in zip(old, new, strict=True)}
    return len(pairs) == len({lr for lr, _ in pairs}) == len({lr for _, lr in pairs})


def _other_groups(old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> ConfigError:
    return ConfigError(f"{_told('lora.layers', old, new)}: other layers share a learning rate than in the checkpoint, "
                       f"but '{config.optimizer.name}' keeps sums over the steps for those that share one",
                       hint="rates may change, but layers with the same rate need the same one, and others another; or "
                       "choose another RUN with -o")


def _taken_back(start: Start, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Notes on settings that the run was started with after it had saved this checkpoint, and that are not given now.
    """
    if not (start.run.path / "run.json").is_file():
        return
    last = _flat(read_run(start.run).table)
    for name in SETTINGS:
        free = SETTINGS[name].spec.resume or name == "lora.layers"
        # One that an earlier version did not have is not in its files.
        if free and name in last and old.get(name) == new.get(name) != last[name]:
            yield (f"{name} is {new.get(name)!r}, as in {start.folder.name}; the run was last started with "
                   f"{last[name]!r}, which takes an option again")


def _rescaled(differing: Sequence[str], start: Start, setup: Setup) -> Iterator[str]:
    """A note if changes put the losses in the log on another scale."""
    before = setup.identity.facts if start.state.data is None else start.state.data.facts
    errors = [title for fact, title in _FACTS.items() if before.get(fact) != setup.identity.facts[fact]]
    errors += [name for name in differing if name in _ERRORS]
    names = errors + [name for name in differing if name in _WEIGHTS]
    if names:
        yield (f"{listed(names)} {'put' if len(names) > 1 else 'puts'} the losses of training "
               f"{'and validation ' if errors else ''}on another scale: those after step {start.state.step} do not "
               "compare with those before")


def _as_it_was(start: Start, setup: Setup) -> str:
    """How to resume with the run's copy of its manifest, which has to lie where the manifest lay: that names its cache
    from there."""
    copy, named = start.run.path / "manifest.json", setup.request.manifest
    if not is_file(named) or not copy.is_file():
        return "resume with the manifest as it was"
    beside = named.with_name(f"{named.stem}-{start.run.path.name}.json")
    return (f"resume with the manifest as it was: cp {shell_name(str(copy))} {shell_name(str(beside))}, and name that "
            "in place of this one")


def _adoptable(start: Start, setup: Setup) -> Iterator[tuple[str, Problem]]:
    """Changes of steps, data and model: for each, a description and the error that refuses it."""
    state, name = start.state, start.folder.name
    if state.meaning != MEANING:
        meaning = f"{MEANINGS[MEANING]}; was: {MEANINGS[state.meaning]}"
        yield meaning, ConfigError(f"{name} was trained by an earlier version, in another way. Now {meaning}",
                                   hint=f"resume with that version, or {_ADOPT}")
    changed = _data_changes(start, setup)
    if changed:
        yield "; ".join(changed), CacheError(
            f"the data differ from those that {name} was trained on: {'; '.join(changed)}",
            hint=f"{_as_it_was(start, setup)}, train the new one into another RUN with -o, or {_ADOPT}")
    for part in dict.fromkeys((*state.base, PART)):
        new, old = (base.get(part, "none")[:12] for base in (setup.model.base, state.base))
        if new != old:
            whose, way = ("", "--set base.adapter=FILE") if part == PART else (f" of {setup.model.path}", "--model")
            yield f"{part} {new}, was {old}", ModelError(
                f"the {part}{whose} differs from that of {name}: it is {new}, expected {old}",
                hint=f"name that of the run with {way}, or {_ADOPT}")


def _data_changes(start: Start, setup: Setup) -> list[str]:
    state = start.state
    if state.data is not None:
        return changes(state.data.facts, state.data.digest, read_records(start.run.path, state.data.facts["samples"]),
                       setup.identity)
    differences = []  # version 1 had the digest of the manifest alone
    if state.manifest != setup.manifest.digest:
        differences.append(f"manifest {setup.manifest.digest[:12]}, was {state.manifest[:12]}")
    if start.config.loss.masked != setup.masked:
        differences.append(f"use of masks: {'on' if setup.masked else 'off'}")
    return differences


def _consequence(name: str, start: Start, setup: Setup) -> str:
    """The effect of a changed setting on the remaining steps, if it is not obvious; begins with a semicolon."""
    config = setup.config
    if name == "micro_batch":
        size = f"; the steps keep their planned micro-batch of {setup.plan.micro_batch}"
        most = ", the most that a forward pass can take" if config.micro_batch > setup.plan.micro_batch else ""
        return size + most + ("; LoRA dropout draws differ" if config.lora.dropout else "")
    if name in ("steps", "epochs") and config.schedule.name != "constant":
        return f"; the {config.schedule.name} schedule is stretched from step {start.state.step} on"
    return ""


def _other_settings(names: list[str], old: Mapping[str, Any], new: Mapping[str, Any], way_out: str) -> ConfigError:
    message = "; ".join(f"{name} is {new.get(name)!r}, but the checkpoint was trained with {old.get(name)!r}"
                        for name in names)
    flags = listed([_FLAGS[name] for name in names if name in _FLAGS])
    omit = f"omit {flags}, or else -c or --set" if flags else "omit -c and --set"
    return ConfigError(message, hint=f"resume with the run's settings ({omit}), or {way_out}")


def _told(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """For state.json and the results, which record accepted changes in these words."""
    return f"{name} is {new.get(name)!r}, was {old.get(name)!r}"


def _noted(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{name} is {_spelled(new.get(name))}, was {_spelled(old.get(name))}"


def _spelled(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat
