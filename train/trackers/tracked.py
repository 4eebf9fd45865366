"""Passes the events of a run on to the trackers that the settings name. One that fails is left out, with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from prep.errors import ConfigError, first_line
from prep.runs.events import Event
from prep.training.schema import Config, Logging
from train.config.load import as_table, published
from train.runs.log import Watch
from train.trackers.tensorboard import TensorBoard
from train.trackers.wandb import Wandb


class Tracker(Protocol):
    """Shows the events of a run somewhere."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


# Setting of `log` → the library, which is also the extra, and what opens a tracker: of a directory, after a step.
_TRACKERS: MappingProxyType[str, tuple[str, Callable[[Path, int, Config], Tracker]]] = MappingProxyType({
    "tensorboard": ("tensorboard", lambda run, step, config: TensorBoard(run, step)),
    "wandb": ("wandb", lambda run, step, config: Wandb(run, config.log.wandb, as_table(published(config))))})


def check_trackers(settings: Logging) -> None:
    """Raises `ConfigError` if the library of a tracker is not installed."""
    for name, (library, _) in _TRACKERS.items():
        if getattr(settings, name) and find_spec(library) is None:
            raise ConfigError(f"log.{name} is set, which needs the library {library}",
                              hint=f"pip install 'latentry[{library}]'")


class Tracked:
    """A watcher of events that passes them to `watch` and to the trackers, which the run's first event opens."""

    def __init__(self, watch: Watch, config: Config, run: Path) -> None:
        self._watch, self._run, self._config = watch, run, config
        self._wanted = [name for name in _TRACKERS if getattr(config.log, name)]
        self._open: dict[str, Any] = {}
        self.warn: Callable[[int, str], object] = lambda step, text: watch({"event": "warning", "step": step,
                                                                             "text": text})

    def __call__(self, event: Event) -> None:
        """Passes on one event."""
        self._watch(event)
        if event["event"] == "start":
            for name in self._wanted:
                self._try(name, event, self._begin)
        for name in list(self._open):
            self._try(name, event, self._show)

    def close(self) -> None:
        """Closes the trackers; errors here do not stop the run."""
        for tracker in self._open.values():
            with suppress(Exception):
                tracker.close()
        self._open = {}

    def _begin(self, name: str, event: Event) -> None:
        self._open[name] = _TRACKERS[name][1](self._run, event["step"], self._config)

    def _show(self, name: str, event: Event) -> None:
        self._open[name](event)

    def _try(self, name: str, event: Event, act: Callable[[str, Event], None]) -> None:
        try:
            act(name, event)
        except Exception as error:
            self._open.pop(name, None)
            self.warn(event["step"], f"log.{name} shows no more: {type(error).__name__}: {first_line(error)}")


@contextmanager
def tracking(watch: Watch, config: Config, run: Path) -> Iterator[Tracked]:
    """A `Tracked` whose trackers are closed at the end."""
    tracked = Tracked(watch, config, run)
    try:
        yield tracked
    finally:
        tracked.close()
