"""Reference pictures from files to steps: what is encoded, read, shown, and encoded again after which change.

FLUX.2 klein stands for the families that take them; tests/whole/test_families.py compares each with its pipeline.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from pictures import draw
from PIL import Image
from runs import events
from safetensors.torch import load_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack the family")

import tiny_pipelines

from prep.errors import ConfigError
from prep.fs import memo
from prep.keys import LatentKeys
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import Index, open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.models.vae import load_vae
from train.sampling.prompts import cached, current, of_captions, references_of
from train.sampling.text import encode_prompts

SCHEMAS = Path(__file__).parents[2] / "manifests"
TARGETS = [(96, 64), (96, 64), (64, 96), (64, 96)]
RECIPE = """
[model]
path = "model"
dtype = "float32"
[image]
resolution = 80
step = 16
[references]
from = ["first", "second"]
missing = "none"
[prompts]
file = "prompts.txt"
[validation]
fraction = 0.0
[[source]]
path = "photos"
"""
PROMPTS = "make it blue --ref first/0.png --ref own.png --w 96 --h 64\nof nothing --w 64 --h 64\n"


@dataclass(frozen=True, kw_only=True)
class World:
    """A directory with pictures, references, a recipe, and what was encoded of them."""

    root: Path
    encode: Callable[..., Any]

    @property
    def index(self) -> Index:
        return open_index(read_manifest(self.root / "m.json"))

    def again(self, *options: object) -> dict[str, int]:
        """The rows that another `prep encode` makes."""
        made: dict[str, int] = self.encode(self.root, *options).json["encoded"]
        return made


def encode_in(prep: Callable[..., Any], root: Path, *options: object) -> Any:
    result = prep("encode", root / "r.toml", "--cache", root / "cache", "-o", root / "m.json", "--device", "cpu",
                  "--json", "--quiet", *options)
    assert result.code == 0, result.err
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all tests begin with; never changed."""
    root = tmp_path_factory.mktemp("edits")
    tiny_pipelines.save("flux2_klein", root / "model")
    for number, size in enumerate(TARGETS):
        draw(root / f"photos/{number}.png", size, seed=number).with_suffix(".txt").write_text(f"make it {number}")
        draw(root / f"first/{number}.png", (80 + 16 * (number % 2), 70), seed=20 + number)
    for number in (0, 2):
        draw(root / f"second/{number}.png", (64, 128), seed=40)  # one picture for both
    draw(root / "own.png", (64, 64), seed=60)
    (root / "r.toml").write_text(RECIPE)
    (root / "prompts.txt").write_text(PROMPTS)
    return root


@pytest.fixture
def world(whole: Path, prep: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world of the test's own, encoded."""
    monkeypatch.setattr(memo, "REST_NS", -(10**12))  # as if files had been at rest for long
    root = tmp_path / "edits"
    if not (whole / "m.json").exists():
        encode_in(prep, whole)
    shutil.copytree(whole, root)
    return World(root=root, encode=lambda place, *options: encode_in(prep, place, *options))


def test_rows_of_references_are_what_the_vae_makes_of_the_pictures(world: World) -> None:
    """Each at its own size, cropped to whole tokens, as the pipeline does; one row for one picture."""
    index, rows = world.index, Rows(world.index)
    assert set(index.manifest.shapes) == {
        ((96, 64), ((80, 64), (64, 128))), ((96, 64), ((96, 64),)), ((64, 96), ((80, 64), (64, 128))),
        ((64, 96), ((96, 64),))}
    assert index.manifest.fields["latent"].rows == 4 + 4 + 1 + 1, "targets, first, second, that of a prompt"
    vae = load_vae(world.root / "model", torch.float32)
    plan_of = {index.samples.name(number): number for number in range(len(index.samples))}
    for name, sample in plan_of.items():
        view = int(index.samples.view_offsets[sample])
        for number in index.samples.references_of(sample, view):
            described = index.samples.table["references"][sample][number - int(index.samples.reference_offsets[sample])]
            path = world.root / ("second" if described["height"].as_py() == 128 else "first") / name
            size = index.manifest.shapes[int(index.samples.bucket[sample])][1][number - int(
                index.samples.reference_offsets[sample])]
            picture = Image.open(path).convert("RGB")
            left, top = (picture.width - size[0]) // 2, (picture.height - size[1]) // 2
            pixels = np.asarray(picture.crop((left, top, left + size[0], top + size[1])), np.float32)
            with torch.no_grad():
                wanted = vae.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mean
            columns = index.samples.references
            place = index.ref(int(columns["latent_shard"][number]), int(columns["latent_row"][number]))
            torch.testing.assert_close(rows.latent(place), wanted, rtol=1e-5, atol=1e-5)


def test_a_picture_that_is_target_and_reference_at_one_size_has_one_row(world: World) -> None:
    shutil.copy(world.root / "photos/0.png", world.root / "first/1.png")  # 96x64: as the bucket of the target
    assert world.again() == {"latent": 0, "mask": 0, "text": 0}
    assert world.index.manifest.fields["latent"].rows == 9


# ---- what is encoded again -------------------------------------------------------------------------------------------


def swap(root: Path) -> None:
    first, second = root / "first/0.png", root / "first/2.png"
    first.rename(root / "aside.png")
    second.rename(first)
    (root / "aside.png").rename(second)


def reorder(root: Path) -> None:
    (root / "r.toml").write_text(RECIPE.replace('["first", "second"]', '["second", "first"]'))


def rename(root: Path) -> None:
    for folder in ("photos", "first", "second"):
        for path in (root / folder).glob("2.*"):
            path.rename(path.with_stem("zebra"))


CHANGES: dict[str, tuple[Callable[[Path], object], tuple[int, int]]] = {  # what is done; latents and texts made
    "nothing": (lambda root: None, (0, 0)),
    "a reference edited": (lambda root: draw(root / "first/1.png", (96, 70), seed=99), (1, 0)),
    "a shared reference edited": (lambda root: [draw(root / f"second/{name}.png", (64, 128), seed=99)
                                                for name in (0, 2)], (1, 0)),
    "a reference enlarged": (lambda root: draw(root / "first/1.png", (112, 112), seed=99), (1, 0)),
    "two references swapped": (swap, (0, 0)),
    "references in another order": (reorder, (0, 0)),
    "a reference added": (lambda root: draw(root / "second/1.png", (64, 64), seed=70), (1, 0)),
    "a known picture as another reference": (lambda root: shutil.copy(root / "first/3.png", root / "second/3.png"),
                                             (0, 0)),
    "a reference removed": (lambda root: (root / "second/2.png").unlink(), (0, 0)),
    "all with a name renamed": (rename, (0, 0)),
    "a caption changed": (lambda root: (root / "photos/0.txt").write_text("another"), (0, 1)),
    "a target edited": (lambda root: draw(root / "photos/0.png", (96, 64), seed=99), (1, 0)),
    "the reference of a prompt edited": (lambda root: draw(root / "own.png", (64, 64), seed=99), (1, 0)),
    "another prompt with a known reference": (lambda root: (root / "prompts.txt").write_text(
        f"{PROMPTS}make it red --ref first/3.png\n"), (0, 1)),
}


@pytest.mark.parametrize("what", [
    name if number in (0, 1, 5, 8, 12) else pytest.param(name, marks=pytest.mark.slow)
    for number, name in enumerate(CHANGES)])
def test_exactly_the_rows_that_a_change_decides_are_made(world: World, what: str) -> None:
    change, (latents, texts) = CHANGES[what]
    change(world.root)
    assert world.again() == {"latent": latents, "mask": 0, "text": texts}
    index = world.index  # which checks every place and shape
    with batches(Rows(index), draws.training(index, plan_of(index), 0, 2, timesteps=1000), masked=False,
                 pinned=False) as feed:
        assert all(len(batch.references) == len(index.manifest.shapes[int(index.samples.bucket[
            batch.draws[0].sample])][1]) for batch in feed)


def plan_of(index: Index) -> Any:
    from prep.batching.plan import step_plan

    return step_plan(index.counts, seed=0, batch_size=4, micro_batch=2)


def test_references_of_prompts_are_fitted_as_those_of_samples(world: World, prep: Callable[..., Any]) -> None:
    """Also of prompts that replace them later; at the bucket of nothing, they are as the family has them."""
    assert world.again("--reference-resolution", 64)["latent"] == 5, "that of the prompt is a sample's, too"
    (blue, _) = cached(world.index)
    assert [tuple(Rows(world.index).latent(place).shape[2:]) for place in blue.references] == [(6, 8), (8, 8)]
    (world.root / "more.txt").write_text("x --ref second/0.png\n")
    assert prep("prompts", world.root / "more.txt", "--manifest", world.root / "m.json", "--device", "cpu",
                "--quiet").code == 0
    (again,) = cached(world.index)
    assert tuple(Rows(world.index).latent(again.references[0]).shape[2:]) == (10, 4)
    Draft202012Validator(json.loads((SCHEMAS / "manifest.schema.json").read_text(encoding="utf-8"))).validate(
        json.loads((world.root / "m.json").read_bytes()))


@pytest.mark.parametrize(("options", "sizes", "made"), [
    (("--reference-fit", "bucket"), {((96, 64), (96, 64)), ((64, 96), (64, 96)), ((96, 64),), ((64, 96),)}, 5),
    pytest.param(("--reference-fit", "exact"), {((80, 64), (64, 128)), ((96, 64),)}, 0, marks=pytest.mark.slow),
    pytest.param(("--reference-resolution", 64), {((64, 48), (32, 80)), ((64, 48),)}, 5, marks=pytest.mark.slow)])
def test_sizes_follow_the_recipe(world: World, options: tuple[object, ...], sizes: set[Any], made: int) -> None:
    """As the family, at the bucket of the target, or as they are."""
    assert world.again(*options)["latent"] == made
    assert {references for _, references in world.index.manifest.shapes} == sizes


def test_a_mirrored_view_has_mirrored_references(world: World) -> None:
    assert world.again("--flip", "both")["latent"] == 4 + 4 + 1
    index = world.index
    columns = index.samples.references
    assert columns["flip"].any() and not columns["flip"].all()
    for sample in range(len(index.samples)):
        views = range(*index.samples.view_offsets[sample:sample + 2].tolist())
        for view in views:
            assert all(bool(columns["flip"][each]) == bool(index.samples.views["flip"][view])
                       for each in index.samples.references_of(sample, view))
    assert references_of(index, cached_prompt("x --ref first/0.png"), world.root) != [None]


def cached_prompt(line: str) -> Any:
    from prep.recipe.prompts import parse_prompt

    return parse_prompt(line, "test")


# ---- refused ---------------------------------------------------------------------------------------------------------


def refused(world: World, prep: Callable[..., Any], *options: object) -> Any:
    return prep("encode", world.root / "r.toml", "--cache", world.root / "cache", "-o", world.root / "n.json",
                "--device", "cpu", *options)


def test_a_family_without_references_refuses_them(world: World, prep: Callable[..., Any], tiny_model: Path) -> None:
    (world.root / "prompts.txt").write_text("a prompt\n")
    result = refused(world, prep, "--model", tiny_model)
    assert result.code == 3 and "4 pictures have reference pictures, which family 'sd15' does not take" in result.err
    assert "flux2_klein" in result.err and not (world.root / "n.json").exists()


def test_prompts_of_a_family_without_references_name_none(world: World, prep: Callable[..., Any], tiny_model: Path
                                                          ) -> None:
    result = refused(world, prep, "--model", tiny_model, "--references", "none")
    assert result.code == 3 and "has --ref, expected none for family 'sd15', which takes no reference" in result.err


@pytest.mark.parametrize(("line", "says"), [
    ("x --ref gone.png", "gone.png: cannot be read: No such file"), ("x --ref r.toml", "line 1 names the reference"),
    ("x --ref", "--ref has no path"), ("x" + " --ref own.png" * 5, "has 5 references, expected at most 4"),
    ("x --ref own.png --mask own.png", "has --mask, expected none for family 'flux2_klein', which does not inpaint"),
    ("x --ref tiny.png", "it is 32x32, which family 'flux2_klein' does not take")])
def test_a_prompt_whose_reference_cannot_be_used(world: World, prep: Callable[..., Any], line: str, says: str) -> None:
    draw(world.root / "tiny.png", (32, 32), seed=3)
    (world.root / "prompts.txt").write_text(line)
    result = refused(world, prep)
    assert result.code == 3 and says in result.err, result.err


def test_a_picture_with_a_reference_that_is_too_small_is_left_out_by_name(world: World, prep: Callable[..., Any]
                                                                          ) -> None:
    draw(world.root / "first/3.png", (32, 32), seed=3)
    result = encode_in(prep, world.root)
    assert (len(result.json["rejected"]), result.json["samples"]["train"]) == (1, 3)
    found = prep("inspect", world.root / "m.json", "--json").json["findings"]
    assert [(each["path"], each["code"]) for each in found] == [("3.png", "too-small")]
    assert "its reference first/3.png is 32x32" in found[0]["detail"]


def test_a_damaged_reference_is_found_and_mended(world: World, prep: Callable[..., Any]) -> None:
    index = world.index
    shard = next(facts for facts in index.shards if facts.field == "latent" and facts.shapes["latent"] == (32, 16, 8))
    path = world.root / "cache" / "shards" / shard.digest[:2] / shard.digest / "latent" / "c.0.0.0.0"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    result = prep("verify", world.root / "m.json")
    assert result.code == 7 and "0.png" in result.out + result.err and "2.png" in result.out + result.err, result
    assert world.again() == {"latent": 1, "mask": 0, "text": 0}
    assert prep("verify", world.root / "m.json").code == 0


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_have_the_rows_of_their_references(world: World) -> None:
    index = world.index
    blue, nothing = cached(index)
    assert [tuple(Rows(index).latent(place).shape) for place in blue.references] == [(1, 32, 8, 10), (1, 32, 8, 8)]
    assert nothing.references == ()
    described = index.manifest.document["prompts"]["samples"][0]["references"]
    assert [each["name"] for each in described] == ["first/0.png", "own.png"]


def test_captions_as_prompts_have_the_references_of_their_samples(world: World) -> None:
    index = world.index
    prompts, _ = of_captions(index)
    assert len(prompts) == 4 and all(prompt.references and prompt.target for prompt in prompts)
    assert sorted(len(prompt.references) for prompt in prompts) == [1, 1, 2, 2]


def test_edited_prompts_find_references_by_their_bytes(world: World) -> None:
    """Under any name; those of samples, too. What has no row is named by its line, and nothing of the file is told."""
    shutil.copy(world.root / "first/3.png", world.root / "renamed.png")
    draw(world.root / "new.png", (64, 64), seed=88)
    (world.root / "prompts.txt").write_text("make it 1 --ref renamed.png\nmake it 2 --ref new.png\nmake it 3\n"
                                            "make it 0 --ref /etc/passwd\n")
    found = current(world.index)
    assert [(prompt.prompt, len(prompt.references)) for prompt in found.prompts] == [("make it 1", 1), ("make it 3", 0)]
    assert len(found.warnings) == 2 and all("a reference that is not encoded" in text for text in found.warnings)
    assert "line 2" in found.warnings[0] and "new.png" not in "".join(found.warnings)


@pytest.mark.parametrize(("line", "says"), [
    ("make it 1 --ref new.png", "--prompt names the reference new.png, expected one that is encoded"),
    ("make it 1 --ref https://host/own.png", "--prompt names the reference https://host/own.png, expected one"),
    ("make it 1 --ref a\0b", "expected one that is encoded"), ("make it 1 --ref first", "expected one that is encoded"),
    ("make it 1" + " --ref own.png" * 5, "--prompt has 5 references, expected at most 4, as family 'flux2_klein'")])
def test_a_typed_prompt_has_the_rows_of_its_references_or_is_refused(
        world: World, monkeypatch: pytest.MonkeyPatch, line: str, says: str) -> None:
    monkeypatch.chdir(world.root)
    draw(world.root / "new.png", (64, 64), seed=88)
    index, device = world.index, torch.device("cpu")
    (found,) = encode_prompts(index, world.root / "model", [cached_prompt("make it 1 --ref own.png --ref first/3.png")],
                              device)
    assert found.references[0] == cached(index)[0].references[1] and len(found.references) == 2
    with pytest.raises(ConfigError, match=re.escape(says)):
        encode_prompts(index, world.root / "model", [cached_prompt(line)], device)


def test_edited_prompts_with_more_references_than_the_model_takes_are_skipped(world: World) -> None:
    (world.root / "prompts.txt").write_text("make it 1" + " --ref own.png" * 5 + "\nmake it 2 --ref own.png\n")
    found = current(world.index)
    assert [prompt.prompt for prompt in found.prompts] == ["make it 2"]
    assert len(found.warnings) == 1
    assert "line 1" in found.warnings[0] and "5 references, of which its model takes 4" in found.warnings[0]


def test_prep_prompts_makes_the_manifest_that_an_encode_would(world: World, prep: Callable[..., Any]) -> None:
    (world.root / "more.txt").write_text("make it blue --ref own.png\nmake it 1 --ref first/1.png --ref new.png\n")
    draw(world.root / "new.png", (80, 80), seed=88)
    result = prep("prompts", world.root / "more.txt", "--manifest", world.root / "m.json", "--device", "cpu", "--json",
                  "--quiet")
    assert result.code == 0, result.err
    assert (result.json["prompts"], result.json["encoded"]) == (2, 1), "the row of new.png"
    mine = (world.root / "m.json").read_bytes()
    encode_in(prep, world.root, "--prompts", world.root / "more.txt")
    assert json.loads(mine) == json.loads((world.root / "m.json").read_bytes())
    assert prep("verify", world.root / "m.json").code == 0


def test_keys_are_those_of_pictures(world: World) -> None:
    """So that a target's row serves as a reference."""
    index = world.index
    context = index.manifest.fields["latent"].context
    keys = LatentKeys(context)
    samples = index.samples
    for number, digest in enumerate(samples.reference_digests):
        sample = int(np.searchsorted(samples.reference_offsets, number, side="right")) - 1
        size = index.manifest.shapes[int(samples.bucket[sample])][1][number - int(samples.reference_offsets[sample])]
        place = index.ref(*(int(samples.references[name][number]) for name in ("latent_shard", "latent_row")))
        stored = bytes(Rows(index).reader.keys(place.shard)[place.row]).hex()
        assert stored == keys.key(digest, samples.reference_placement(number, size), None)


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_run_that_is_interrupted_goes_on_to_the_same_weights(world: World, train: Callable[..., Any]) -> None:
    words = ("--device", "cpu", "--quiet", "--batch-size", 2, "--set", "lora.rank=2", "--set", "precision=fp32", "--lr",
             "1e-2", "--set", "reference_dropout=0.3", "--set", "each_reference_dropout=0.3", "--set",
             "checkpoint.every=2")
    assert train("run", world.root / "m.json", "-o", world.root / "one", "--steps", 4, "--set", "sample.every=4",
                 "--set", "sample.steps=1", *words).code == 0
    assert train("run", world.root / "m.json", "-o", world.root / "two", "--steps", 2, "--set", "sample.every=0",
                 *words).code == 0
    assert train("run", world.root / "m.json", "-o", world.root / "two", "--steps", 4, "--resume", "--set",
                 "sample.every=0", *words).code == 0
    one, two = (load_file(world.root / run / "lora.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(tensor.abs().max() > 0 for name, tensor in one.items() if "lora_B" in name)
    (drawn, *_) = [event for event in events(world.root / "one") if event["event"] == "sample"]
    assert drawn["sizes"][0][0] > 96 and drawn["sizes"][1] == [64, 64], "references are beside the picture"


def test_references_change_what_is_learned(world: World, train: Callable[..., Any]) -> None:
    """Without them the loss of the same steps is another one."""
    losses = []
    for dropout in (0, 1):
        run = world.root / f"run{dropout}"
        assert train("run", world.root / "m.json", "-o", run, "--device", "cpu", "--quiet", "--steps", 1,
                     "--batch-size", 4, "--set", "sample.every=0", "--set", f"reference_dropout={dropout}").code == 0
        losses.append(next(event["loss"] for event in events(run) if event["event"] == "step"))
    assert losses[0] != losses[1]
