"""The way from pictures to a LoRA, as steps: the command of each, the fields that matter first, and what fills them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prep.studio.project import Project


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command on the way."""

    title: str
    does: str
    form: str  # its name: prep-init
    main: tuple[str, ...]  # fields that are shown first
    fill: Mapping[str, str] = field(default_factory=dict)  # field → kind of names in the project that it takes
    preset: Mapping[str, str] = field(default_factory=dict)  # field → a value
    fresh: Mapping[str, str] = field(default_factory=dict)  # field → the stem of a name that nothing has yet
    makes: str = ""  # the kind of names that it adds to the project
    asks: str = ""  # the form of the command that says what it would take, if one does

    @property
    def program(self) -> str:
        """prep or train."""
        return self.form.partition("-")[0]

    @property
    def command(self) -> str:
        """The command of the program."""
        return self.form.partition("-")[2]

    def filled(self, project: Project) -> dict[str, list[str]]:
        """Values of fields, as far as the project tells."""
        values = {name: [value] for name, value in self.preset.items()}
        values |= {name: [project.likely(kind)] for name, kind in self.fill.items() if project.names(kind)}
        return values | {name: [_fresh(project, stem)] for name, stem in self.fresh.items()}


STEPS = (
    Step(title="Describe the pictures", does="Looks at a directory of pictures, or at another trainer's file, and "
         "writes a commented recipe.", form="prep-init", main=("sources", "other", "output", "model"),
         fill={"sources": "pictures", "model": "models"}, makes="recipes"),
    Step(title="Check the pictures", does="Decodes each picture and reads each caption and mask; lists what is wrong.",
         form="prep-scan", main=("source", "model"), fill={"source": "source"}),
    Step(title="See what is in the set", does="Compares what pictures show, by a vision model: near-duplicates, "
         "outliers, what takes most of an epoch.", form="prep-embed", main=("source", "model", "cache", "device"),
         fill={"source": "source"}, preset={"cache": "cache"}),
    Step(title="Make captions", does="Asks a model, here or of a server, about each picture that has no caption.",
         form="prep-caption", main=("source", "model", "endpoint", "trigger", "limit"), fill={"source": "source"}),
    Step(title="Make masks", does="Says what of each picture trains: from transparency, colors, or a model.",
         form="prep-mask", main=("source", "method", "output", "prompt", "model"), fill={"source": "source"},
         fresh={"output": "masks"}),
    Step(title="See the buckets", does="Shows which sizes the pictures are scaled to.", form="prep-bucket",
         main=("source", "resolution"), fill={"source": "source"}),
    Step(title="Encode", does="Makes the cache that training reads, and the manifest. Ask first what it would take.",
         form="prep-encode", main=("source", "model", "cache", "output", "device"),
         fill={"source": "source", "model": "models"}, preset={"cache": "cache", "output": "manifest.json"},
         makes="manifests", asks="prep-encode"),
    Step(title="Choose settings", does="Writes a commented train.toml; with a limit of memory, one that fits.",
         form="train-init", main=("manifest", "memory", "output"), fill={"manifest": "manifests"},
         fresh={"output": "train.toml"}, makes="settings"),
    Step(title="Check the run", does="Checks all that training needs, and says whether it fits into memory, before "
         "anything is loaded.", form="train-check", main=("manifest", "config", "steps", "device", "memory"),
         fill={"manifest": "manifests", "config": "settings"}),
    Step(title="Train", does="Trains, saves checkpoints and draws sample pictures; can be stopped and continued.",
         form="train-run", main=("manifest", "config", "output", "steps", "device"),
         fill={"manifest": "manifests", "config": "settings"}, fresh={"output": "run"}, makes="runs",
         asks="train-check"),
    Step(title="Choose a checkpoint", does="Draws the same prompts with each checkpoint, compares the pictures with "
         "those of the data set, and proposes one. The manifest needs embeddings.", form="train-evaluate",
         main=("folder", "embed", "seeds", "html", "device"), fill={"folder": "runs"},
         fresh={"html": "checkpoints.html"}),
    Step(title="Draw", does="Makes pictures with what was trained.", form="train-sample",
         main=("folder", "prompt", "output", "device"), fill={"folder": "runs"}, fresh={"output": "grid.png"}),
    Step(title="Put it into a model", does="Adds a LoRA to its model: a directory that needs no LoRA.",
         form="train-merge", main=("lora", "output", "strength"), fill={"lora": "runs"},
         fresh={"output": "merged"}),
    Step(title="Use it elsewhere", does="Writes the pictures, captions and masks for another program.",
         form="prep-export", main=("manifest", "to", "output"), fill={"manifest": "manifests"},
         fresh={"output": "exported"}),
)


def next_step(project: Project) -> Step:
    """The step after the last one that has made something; that one, if none comes after it."""
    making = [step for step in STEPS if step.makes and step.makes != "settings"]
    made = [place for place, step in enumerate(making) if project.names(step.makes)]
    return making[min(max(made, default=-1) + 1, len(making) - 1)]


def _fresh(project: Project, stem: str) -> str:
    """A name that nothing in the project has: run, run-2, run-3."""
    name, dot, ending = stem.partition(".")
    number = 1
    while (project.folder / (made := f"{name}{f'-{number}' if number > 1 else ''}{dot}{ending}")).exists():
        number += 1
    return made
