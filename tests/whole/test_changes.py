"""What each change to pictures, captions, masks, model or options makes `prep encode` encode again, and nothing else.

Counted at the encoders themselves: pictures given to the VAE, captions given to the text encoders, mask rows made.
Stable Diffusion 1.5 has all cases, most of those that change nothing at once; FLUX.1, with two encoders, those about
text that may differ, and Z-Image, with a template, what only it has. Other families, and each case of these, are slow
tests.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pictures import draw, draw_mask
from second_device import playing
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from safetensors.torch import load_file, save_file

from prep import keys
from prep.cache.writer import ShardWriter
from prep.encode.engines import job
from prep.fs import memo
from prep.models import vae
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.text import encoder, pipeline

SIZES = [(64, 64), (70, 64), (96, 32), (64, 64)]  # the second has room for a crop, the third has its own bucket
PICTURES, MASKS, TEXTS = 4, 2, 5  # rows: four captions, and the unconditional row
NOTHING, ALL_LATENTS, ALL_TEXTS = (0, 0, 0), (PICTURES, 0, 0), (0, 0, TEXTS)
BUILT = {name: name.replace("-", "_") for name in FAMILIES}  # the names of tiny_pipelines


@dataclass(frozen=True, kw_only=True)
class World:
    """A dataset, a model, a cache, and the options of the command."""

    root: Path
    options: Mapping[str, Any] = field(default_factory=lambda: {
        "--resolution": 64, "--step": 32, "--dtype": "float32", "--device": "cpu", "--mask": "sidecar"})
    source: str = "photos"
    model_name: str = "model"

    @property
    def photos(self) -> Path:
        return self.root / "photos"

    @property
    def model(self) -> Path:
        return self.root / self.model_name

    def words(self) -> list[Any]:
        places = {"--model": self.model, "--cache": self.root / "cache", "-o": self.root / "m.json"}
        return ["encode", self.root / self.source, "--json",
                *(word for pair in {**places, **self.options}.items() for word in pair)]


Change = Callable[[World], World | None]  # what is done between two runs; the world as the second run sees it


def option(**given: Any) -> Change:
    """Other options, `_` for `-`."""
    return lambda world: replace(world, options={
        **world.options, **{f"--{name.replace('_', '-')}": value for name, value in given.items()}})


# ---- pictures, captions, masks ---------------------------------------------------------------------------------------


def room_for_other_bytes(world: World) -> None:
    """Pads the file, so that other colors fit into its size."""
    path = world.photos / "0.png"
    path.write_bytes(path.read_bytes().ljust(1 << 14, b"\0"))


def other_bytes_of_that_size(world: World) -> None:
    path = world.photos / "0.png"
    stat = path.stat()
    draw(path, SIZES[0], seed=99)
    path.write_bytes(path.read_bytes().ljust(stat.st_size, b"\0"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def rename(world: World) -> None:
    for path in world.photos.glob("1*"):
        path.rename(world.photos / path.name.replace("1", "zebra", 1))


def move(world: World) -> World:
    (world.root / "else" / "where").mkdir(parents=True)
    world.photos.rename(world.root / "else" / "where" / "pictures")
    return replace(world, source="else/where/pictures")


def move_within(world: World) -> None:
    (world.photos / "below").mkdir()
    for path in world.photos.glob("1*"):
        path.rename(world.photos / "below" / path.name)


def add(world: World) -> None:
    draw(world.photos / "new.png", (64, 64), seed=50).with_suffix(".txt").write_text("a new one")


def remove(world: World) -> None:
    for path in world.photos.glob("1*"):
        path.unlink()


def edit_caption(world: World) -> None:
    (world.photos / "1.txt").write_text("another caption")


def same_caption_twice(world: World) -> None:
    (world.photos / "1.txt").write_text((world.photos / "0.txt").read_text())


def delete_caption(world: World) -> World | None:
    (world.photos / "1.txt").unlink()
    return option(missing_caption="empty")(world)


def edit_mask(world: World) -> None:
    path = world.photos / "0-masklabel.png"
    draw(path, SIZES[0], seed=7)


def delete_mask(world: World) -> None:
    (world.photos / "0-masklabel.png").unlink()


def touch(world: World) -> None:
    for path in world.photos.iterdir():
        os.utime(path, ns=(0, 0))


def prompts(world: World) -> World | None:
    (world.root / "prompts.txt").write_text("a red cat\n")
    return option(prompts=world.root / "prompts.txt")(world)


def recipe(*sources: str) -> Change:
    """A recipe with these sources, by their globs."""
    def change(world: World) -> World:
        parts = [f'[[source]]\npath = "photos"\ninclude = ["{glob}"]\n' for glob in sources]
        (world.root / "dataset.toml").write_text("\n".join(parts))
        return replace(world, source="dataset.toml")
    return change


def all_at_once(world: World) -> World:
    """Whatever changes no row: of pictures, captions, masks, the model and options."""
    for change in (same_caption_twice, delete_mask, recreate_backwards, touch, rename,
                   config("vae", _diffusers_version="9", _name_or_path="elsewhere"),
                   config("text_encoder", transformers_version="9"), move, move_model, option(shard_mib=1)):
        world = change(world) or world
    return world


def recreate_backwards(world: World) -> None:
    """The same files, made in the opposite order: directories list them otherwise."""
    whole = {path.name: path.read_bytes() for path in world.photos.iterdir()}
    shutil.rmtree(world.photos)
    world.photos.mkdir()
    for name in sorted(whole, reverse=True):
        (world.photos / name).write_bytes(whole[name])


# ---- the model -------------------------------------------------------------------------------------------------------


def weights(component: str) -> Change:
    """One tensor of a component has other values."""
    def change(world: World) -> None:
        path = next((world.model / component).glob("*.safetensors"))
        tensors = load_file(path)
        name = sorted(tensors)[0]
        tensors[name] = tensors[name] + 0.5
        save_file(tensors, path, metadata={"format": "pt"})
    return change


def config(component: str, file: str = "config.json", **values: Any) -> Change:
    """Other values in a component's config."""
    def change(world: World) -> None:
        path = world.model / component / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return change


def tokenizer(component: str) -> Change:
    """The same values, in a file of other bytes."""
    def change(world: World) -> None:
        path, more = world.model / component / "tokenizer.json", b"\n"
        if not path.exists():  # sentencepiece's: a field of protobuf that it does not know
            path, more = path.with_suffix(".model"), b"\x78\x01"
        path.write_bytes(path.read_bytes() + more)
    return change


def adapter(component: str) -> Change:
    """An adapter beside the weights, which transformers would load unasked."""
    def change(world: World) -> None:
        (world.model / component / "adapter_config.json").write_text("{}")
    return change


def template(component: str) -> Change:
    """Other words around each caption."""
    def change(world: World) -> None:
        path = world.model / component / "chat_template.jinja"
        path.write_text(path.read_text() + "{{ 'and more' }}")
    return change


def index(name: str) -> Change:
    """Another value in model_index.json."""
    def change(world: World) -> None:
        path = world.model / "model_index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: other_value(world, name)}))
    return change


def move_model(world: World) -> World:
    world.model.rename(world.root / "moved-model")
    return replace(world, model_name="moved-model")


# ---- the machine and the program -------------------------------------------------------------------------------------


@contextmanager
def second_device(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another device, made of host memory. Weights are loaded outside of it: libraries use `meta` for themselves."""
    def outside(load: Callable[..., Any]) -> Callable[..., Any]:
        def loading(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return load(*args, **options)
        return loading

    with playing() as there:
        for module in (vae, encoder):
            patch.setattr(module, "pick_device", lambda name: there)
        for module, name in ((vae, "load_diffusers"), (pipeline, "load_transformers")):
            patch.setattr(module, name, outside(getattr(module, name)))
        yield


@contextmanager
def newer_libraries(patch: pytest.MonkeyPatch) -> Iterator[None]:
    job._versions.cache_clear()
    patch.setattr(job, "version", lambda name: "999.0")
    yield
    job._versions.cache_clear()


def meaning(name: str) -> Callable[[pytest.MonkeyPatch], Any]:
    """A version of the program whose rows of one field mean something else."""
    @contextmanager
    def program(patch: pytest.MonkeyPatch) -> Iterator[None]:
        patch.setattr(keys, name, getattr(keys, name) + 1)
        yield
    return program


def other_constants(family: str) -> Callable[[pytest.MonkeyPatch], Any]:
    """A version of the program that has other templates and the like for a family."""
    @contextmanager
    def program(patch: pytest.MonkeyPatch) -> Iterator[None]:
        facts = FAMILIES[family]
        constants = {name: f"other {value}" for name, value in (facts.text.constants or {}).items()}
        patch.setitem(FAMILIES, family, replace(facts, text=replace(facts.text, constants=constants)))
        yield
    return program


@contextmanager
def as_usual(patch: pytest.MonkeyPatch) -> Iterator[None]:
    yield


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change, and how many latents, masks and texts it makes the second run encode."""

    name: str
    change: Change = lambda world: None
    wanted: tuple[int, int, int] = NOTHING
    start: Change = lambda world: None  # what differs from the usual before the first run
    fresh: bool = False  # whether the first run starts without a cache
    first: Callable[[pytest.MonkeyPatch], Any] = as_usual  # around the first run
    second: Callable[[pytest.MonkeyPatch], Any] = as_usual
    code: int = 0
    message: str = ""
    text: bool = False  # whether it is about text


CASES = [
    Case(name="nothing", text=True),
    Case(name="all at once", change=all_at_once),
    Case(name="file times", change=touch),
    Case(name="picture", start=room_for_other_bytes, change=other_bytes_of_that_size, wanted=(1, 0, 0)),
    Case(name="rename", change=rename),
    Case(name="move", change=move),
    Case(name="move within", change=move_within),
    Case(name="added", change=add, wanted=(1, 0, 1)),
    Case(name="removed", change=remove),
    Case(name="order of files", change=recreate_backwards),
    Case(name="order of sources", start=recipe("[01]*", "[23]*"), change=recipe("[23]*", "[01]*")),
    Case(name="caption", change=edit_caption, wanted=(0, 0, 1), text=True),
    Case(name="caption of another", change=same_caption_twice),
    Case(name="caption deleted", change=delete_caption, wanted=(0, 0, 1), text=True),
    Case(name="prompts", change=prompts, wanted=(0, 0, 1), text=True),
    Case(name="mask", change=edit_mask, wanted=(0, 1, 0)),
    Case(name="mask deleted", change=delete_mask),
    Case(name="masks on", start=option(mask="none"), fresh=True, change=option(mask="sidecar"), wanted=(0, MASKS, 0)),
    Case(name="masks off", change=option(mask="none")),
    Case(name="resolution", change=option(resolution=32), wanted=(PICTURES, MASKS, 0)),
    Case(name="another resolution", change=option(resolution="32,64"), wanted=(PICTURES, MASKS, 0)),
    Case(name="bucket set", change=option(buckets="list", sizes="64x64,64x32"), wanted=(1, 1, 0)),  # of 96x32
    Case(name="crop", change=option(crop="random"), wanted=(1, 0, 0)),  # of the only picture that is cropped
    Case(name="flip", change=option(flip="both"), wanted=(PICTURES, MASKS, 0)),
    Case(name="posterior", change=option(posterior="mean+std"), wanted=ALL_LATENTS),
    Case(name="dtype", change=option(dtype="bfloat16"), wanted=(PICTURES, 0, TEXTS), text=True),
    Case(name="compute dtype", change=option(compute="bfloat16"), wanted=(PICTURES, 0, TEXTS)),
    Case(name="VAE weights", change=weights("vae"), wanted=ALL_LATENTS),
    Case(name="VAE config", change=config("vae", sample_size=128), wanted=ALL_LATENTS),
    Case(name="VAE saved again", change=config("vae", _diffusers_version="9", _name_or_path="elsewhere")),
    Case(name="model moved", change=move_model),
    Case(name="batch size and threads", start=option(batch_size=1, jobs=1), fresh=True,
         change=option(batch_size=3, jobs=3)),
    Case(name="shard size", change=option(shard_mib=1)),
    Case(name="device", first=second_device, fresh=True, text=True),
    Case(name="library versions", second=newer_libraries, text=True),
    Case(name="libraries that saved the model", change=config("text_encoder", transformers_version="9")),
    Case(name="meaning of latents", second=meaning("LATENT_MEANING"), wanted=ALL_LATENTS),
    Case(name="meaning of masks", second=meaning("MASK_MEANING"), wanted=(0, MASKS, 0)),
    Case(name="meaning of text", second=meaning("TEXT_MEANING"), wanted=ALL_TEXTS, text=True),
]


def cases_of(family: str) -> list[Case]:
    """The cases of every family, and those of its own: its text encoders, tokenizers and options of text."""
    facts = FAMILIES[family]
    found = [*(own(case, facts) for case in CASES), Case(name="denoiser", change=config(facts.denoiser, sample_size=8)),
             *option_cases(facts)]
    if any(not kind.startswith(("CLIP", "T5")) for name, kinds in facts.components.items() for _, kind in kinds
           if name.startswith("text_encoder")):
        found = [case for case in found if case.name != "device"]  # caches of language models leave the second device
    for name in facts.components:
        if name.startswith("text_encoder"):
            found += [Case(name=f"{name} weights", change=weights(name), wanted=ALL_TEXTS, text=True),
                      Case(name=f"{name} config", change=config(name, initializer_range=0.5), wanted=ALL_TEXTS,
                           text=True),
                      Case(name=f"{name} adapter", change=adapter(name), code=6, text=True,
                           message="an adapter beside the weights is not in the fingerprint")]
        if name.startswith("tokenizer"):
            found.append(Case(name=f"{name}", change=tokenizer(name), wanted=ALL_TEXTS, text=True))
    return found


def own(case: Case, family: Family) -> Case:
    """A case with what a family does about it."""
    if case.name == "compute dtype" and family.text_compute == "bfloat16":  # as without the option
        return replace(case, wanted=ALL_LATENTS)
    if case.name == "posterior" and family.components["vae"][0][1] == "AutoencoderDC":
        return replace(case, wanted=NOTHING, code=3, message="encodes a picture to one latent, without a standard")
    return case


def other_value(world: World, name: str) -> Any:
    """Another value of model_index.json that a pipeline takes."""
    value = json.loads((world.model / "model_index.json").read_text())[name]
    return not value if isinstance(value, bool) else [*value[:-1], value[-1] - 1]


def option_cases(family: Family) -> Iterator[Case]:
    """Cases of the options that a family's text has."""
    facts = family.text
    if facts.shortest < facts.longest:
        yield Case(name="max length", change=option(max_length=facts.max_length // 2), wanted=ALL_TEXTS, text=True)
        yield Case(name="max length given", change=option(max_length=facts.max_length), text=True)
    if facts.clip:
        yield Case(name="clip skip", change=option(clip_skip=1), wanted=ALL_TEXTS, text=True)
    if facts.windows:
        yield Case(name="text windows", change=option(text_windows=2), wanted=ALL_TEXTS, text=True)
    if family.text_compute is not None:
        yield Case(name="quantization", change=option(text_quantization="8bit"), wanted=ALL_TEXTS, text=True)
    if "zimage" in family.name:
        yield Case(name="template", change=template("tokenizer"), wanted=ALL_TEXTS, text=True)
    for name in facts.pipeline_options:
        yield Case(name=name, change=index(name), wanted=ALL_TEXTS, text=True)
    if facts.constants:
        yield Case(name="constants", second=other_constants(family.name), wanted=ALL_TEXTS, text=True)


# What "all at once" does, too.
TOGETHER = ("file times", "rename", "move", "order of files", "caption of another", "mask deleted", "VAE saved again",
            "model moved", "shard size", "libraries that saved the model")
# What is the same code for text of every family.
SHARED = ("caption deleted", "prompts", "library versions")
# Those that inpaint encode each picture twice, and none without a mask: see tests/whole/test_inpainting.py.
TESTED = [name for name, family in FAMILIES.items()
          if BUILT[name] in tiny_pipelines.FAMILIES and family.inpainting is None]


def parameters() -> Iterator[Any]:
    """Every case of every family; quick are those of the families named at the top."""
    for family in TESTED:
        for case in cases_of(family):
            quick = ((family == "sd15" and case.name not in TOGETHER)
                     or (family == "flux" and case.text and case.name not in SHARED)
                     or (family == "zimage" and case.name in ("template", "quantization")))
            yield pytest.param(family, case, id=f"{family}-{case.name}", marks=() if quick else pytest.mark.slow)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Callable[[str], World]:
    """An encoded world of each family, to be copied."""
    made: dict[str, World] = {}

    def world(family: str) -> World:
        if family not in made:
            made[family] = World(root=tmp_path_factory.mktemp(family))
            tiny_pipelines.save(BUILT[family], made[family].model)
            for number, size in enumerate(SIZES):
                path = draw(made[family].photos / f"{number}.png", size, seed=number)
                path.with_suffix(".txt").write_text(f"picture number {number}")
                if number in (0, 2):
                    draw_mask(path.with_name(f"{number}-masklabel.png"), size)
        return made[family]

    return world


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """The rows that encoders were asked for, by field."""
    found: Counter[str] = Counter()
    init, encode, add_row = vae.VaeEncoder.__init__, vae.VaeEncoder.begin, ShardWriter.add
    texts, unconditional = encoder.TextEncoder.encode, encoder.TextEncoder.unconditional

    def begin(self, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        found["latent"] = 0  # the picture that a new VAE is tested with does not count

    def pictures(self, pixels: Any, *args: Any) -> Any:
        found["latent"] += len(pixels)
        return encode(self, pixels, *args)

    def captions(self, given: Any, *args: Any, **options: Any) -> Any:
        found["text"] += len(given)
        return texts(self, given, *args, **options)

    def prompt(self, *args: Any) -> Any:
        found["text"] += 1
        return unconditional(self, *args)

    def written(self, key: str, row: Mapping[str, Any]) -> None:
        found["mask"] += "mask" in row
        add_row(self, key, row)

    for kind, name, counting in ((vae.VaeEncoder, "__init__", begin), (vae.VaeEncoder, "begin", pictures),
                                 (encoder.TextEncoder, "encode", captions),
                                 (encoder.TextEncoder, "unconditional", prompt), (ShardWriter, "add", written)):
        monkeypatch.setattr(kind, name, counting)
    return found


@pytest.fixture
def run(prep, counted):
    """`run(world)` runs the command: the rows it made (latents, masks, texts), and how it ended."""
    def go(world: World) -> tuple[tuple[int, int, int], Any]:
        counted.clear()
        result = prep(*world.words())
        made = (counted["latent"], counted["mask"], counted["text"])
        if result.code == 0:
            said = result.json["encoded"]
            assert made == (said["latent"], said.get("mask", 0), said["text"]), "the report says what was done"
        return made, result

    return go


@pytest.fixture
def copied(worlds, run, tmp_path, monkeypatch):
    """`copied(family)` is a copy of the family's encoded world."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(memo, "REST_NS", 0)  # stamps are trusted at once: what they cannot tell would be missed

    def copy(family: str) -> World:
        original = worlds(family)
        if not (original.root / "cache").exists():
            made, result = run(original)
            assert result.code == 0, result.err
            assert made == (PICTURES, MASKS, TEXTS)
        shutil.copytree(original.root, tmp_path / "world")
        return World(root=tmp_path / "world")

    return copy


@pytest.mark.few("sd15")
@pytest.mark.parametrize(("family", "case"), list(parameters()))
def test_change(family, case, copied, run, monkeypatch):
    world = copied(family)
    world = case.start(world) or world
    if case.fresh:
        shutil.rmtree(world.root / "cache")
    with monkeypatch.context() as patch, case.first(patch):
        made, result = run(world)
    assert result.code == 0, result.err
    assert case.fresh or case.start is not Case.start or made == NOTHING, "a copied dataset and cache are as before"
    world = case.change(world) or world
    with monkeypatch.context() as patch, case.second(patch):
        made, result = run(world)
    assert result.code == case.code and case.message in result.err, result.err
    assert made == case.wanted
