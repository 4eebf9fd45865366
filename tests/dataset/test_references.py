"""Reference pictures, however they are handed in: the same items; what is missing or broken is said of the picture."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pictures import draw
from tarred import member, tar_of

from prep import api
from prep.buckets.assign import Assignments
from prep.dataset.ingest import Ingested, KnownItem, ingest
from prep.dataset.listing import list_recipe
from prep.dataset.reading import FactReader
from prep.dataset.samples import dataset_notes
from prep.errors import ConfigError
from prep.fs import memo
from prep.fs.memo import Memo
from prep.recipe.init import init_from_file, init_from_sources
from prep.recipe.load import load_recipe
from prep.recipe.options import choices_of, given_by
from prep.recipe.schema import Recipe
from prep.recipe.write import render_recipe

SIZES = {("kitten", 0): (80, 72), ("kitten", 1): (96, 64), ("puppy", 0): (72, 88), ("puppy", 1): (64, 112)}


def targets(root: Path) -> Path:
    """Two captioned pictures."""
    for number, name in enumerate(("kitten", "puppy")):
        draw(root / f"{name}.png", (96, 96), seed=number).with_suffix(".txt").write_text(f"a {name}")
    return root


def reference(path: Path, name: str, number: int) -> Path:
    """The reference of this number of a picture."""
    return draw(path, SIZES[name, number], seed=90 + 2 * len(name) + number)


def folders(root: Path) -> list[Path]:
    """A directory of first references, and one of second ones."""
    for name, number in SIZES:
        reference(root / f"control_{number + 1}" / f"{name}.{'jpg' if number else 'png'}", name, number)
    return [root / "control_1", root / "control_2"]


def source_key(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    return written(root, '[[source]]\npath = "main"\nreferences = ["control_1", "control_2"]\n')


def recipe_key(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    return written(root, '[references]\nfrom = ["control_1", "control_2"]\n[[source]]\npath = "main"\n')


def option(root: Path) -> Recipe:
    return load_recipe(targets(root / "main"), choices=choices_of({"references": folders(root)}))


def numbered(root: Path) -> Recipe:
    """One directory, with files called as musubi-tuner calls several."""
    targets(root / "main")
    for name, number in SIZES:
        reference(root / "control" / f"{name}_{number}.png", name, number)
    return written(root, '[[source]]\npath = "main"\nreferences = ["control"]\n')


def inside(root: Path) -> Recipe:
    """Directories of references in the source itself, whose pictures are no samples."""
    folders(targets(root / "all"))
    return written(root, '[[source]]\npath = "all"\nreferences = ["all/control_1", "all/control_2"]\n')


def tarred_targets(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    (root / "main.tar").write_bytes(tar_of([member(path.name, path.read_bytes())
                                            for path in sorted((root / "main").iterdir())]))
    return written(root, '[[source]]\npath = "main.tar"\nreferences = ["control_1", "control_2"]\n')


def rows(root: Path) -> list[tuple[str, list[str]]]:
    """A data set of one directory without captions: the name of each picture, and those of its references."""
    targets(root)
    folders(root)
    for path in root.glob("*.txt"):
        path.unlink()
    return [(name, [f"control_1/{name}.png", f"control_2/{name}.jpg"]) for name in ("kitten", "puppy")]


def json_lines(root: Path, row: Callable[[str, list[str]], dict[str, object]]) -> Recipe:
    lines = [json.dumps(row(name, paths)) for name, paths in rows(root / "all")]
    (root / "all" / "metadata.jsonl").write_text("\n".join(lines))
    return load_recipe(root / "all", choices={})


def musubi_lines(root: Path) -> Recipe:
    return json_lines(root, lambda name, paths: {"image_path": f"{name}.png", "caption": f"a {name}",
                                                 "control_path_0": paths[0], "control_path_1": paths[1]})


def edit_image_list(root: Path) -> Recipe:
    return json_lines(root, lambda name, paths: {"image": f"{name}.png", "prompt": f"a {name}", "edit_image": paths})


def absolute_paths(root: Path) -> Recipe:
    return json_lines(root, lambda name, paths: {
        "image_path": str(root / "all" / f"{name}.png"), "caption": f"a {name}",
        "references": [str(root / "all" / path) for path in paths]})


def csv_columns(root: Path) -> Recipe:
    found = rows(root / "all")
    (root / "all" / "metadata.csv").write_text("file_name,text,conditioning_image_0,conditioning_image_1\n" + "".join(
        f"{name}.png,a {name},{','.join(paths)}\n" for name, paths in found))
    return load_recipe(root / "all", choices={})


def csv_list(root: Path) -> Recipe:
    found = rows(root / "all")
    with (root / "all" / "metadata.csv").open("w") as file:
        csv.writer(file).writerows([("image", "prompt", "edit_image"), *(
            (f"{name}.png", f"a {name}", json.dumps(paths)) for name, paths in found)])
    return load_recipe(root / "all", choices={})


def parquet_lists(root: Path) -> Recipe:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = rows(root / "all")
    pq.write_table(pa.table({"file_name": [f"{name}.png" for name, _ in found],
                             "text": [f"a {name}" for name, _ in found],
                             "references": [paths for _, paths in found]}), root / "all" / "metadata.parquet")
    return load_recipe(root / "all", choices={})


def tar_members(root: Path) -> Recipe:
    targets(root / "main")
    first, second = folders(root)
    files = {path.name: path for path in (root / "main").iterdir()}
    for name in ("kitten", "puppy"):
        files |= {f"{name}.ref1.jpg": second / f"{name}.jpg", f"{name}.ref0.png": first / f"{name}.png"}
    (root / "all.tar").write_bytes(tar_of([member(name, path.read_bytes()) for name, path in sorted(files.items())]))
    return load_recipe(root / "all.tar", choices={})


def found_by_init(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    init_from_sources([root], root / "dataset.toml", model=None, jobs=1, tick=lambda _: None)
    return load_recipe(root / "dataset.toml", choices={})


def converted(root: Path, text: str, name: str) -> Recipe:
    """The recipe that `prep init --from` writes of another tool's file beside `main` and directories of references."""
    (root / name).write_text(text)
    init_from_file(root / name, root / "dataset.toml")
    return load_recipe(root / "dataset.toml", choices={})


def kohya_conditions(root: Path) -> Recipe:
    """A ControlNet's: one directory, and no masked_loss."""
    recipe = numbered(root)
    text = json.dumps({"dataset_config": "set.toml", "max_train_steps": 10, "network_module": "networks.lora"})
    (root / "set.toml").write_text('[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "main"\n'
                                   'conditioning_data_dir = "control"\n')
    assert recipe.file is not None
    recipe.file.unlink()
    return converted(root, text, "kohya.json")


def musubi_directory(root: Path) -> Recipe:
    numbered(root)
    for path in sorted((root / "control").iterdir()):  # as it spells numbers, too
        path.rename(path.with_stem(path.stem[:-1] + "000" + path.stem[-1]))
    (root / "dataset.toml").unlink()
    return converted(root, '[general]\nresolution = [96, 96]\nenable_bucket = true\n[[datasets]]\n'
                     'image_directory = "main"\ncontrol_directory = "control"\ncache_directory = "cache"\n', "set.toml")


def musubi_json_lines(root: Path) -> Recipe:
    """Absolute paths of pictures and references in directories side by side."""
    targets(root / "main")
    folders(root)
    (root / "rows.jsonl").write_text("".join(json.dumps({
        "image_path": str(root / "main" / f"{name}.png"), "caption": f"a {name}",
        "control_path_0": str(root / "control_1" / f"{name}.png"),
        "control_path_1": str(root / "control_2" / f"{name}.jpg")}) + "\n" for name in ("kitten", "puppy")))
    for path in (root / "main").glob("*.txt"):
        path.unlink()
    return converted(root, '[[datasets]]\nresolution = 96\nimage_jsonl_file = "rows.jsonl"\n'
                     'cache_directory = "cache"\n', "set.toml")


def simpletuner_conditioning(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    beside = [{"id": name, "dataset_type": "conditioning", "conditioning_type": kind, "instance_data_dir": name,
               "type": "local"} for name, kind in (("control_2", "reference_loose"), ("control_1", "reference_strict"))]
    images = {"id": "main", "type": "local", "instance_data_dir": "main", "resolution": 64, "resolution_type": "pixel",
              "caption_strategy": "textfile", "conditioning_data": ["control_1", "control_2"]}
    return converted(root, json.dumps([images, *beside]), "multidatabackend.json")


def ai_toolkit_controls(root: Path) -> Recipe:
    targets(root / "main")
    folders(root)
    return converted(root, "job: extension\nconfig:\n  process:\n    - type: sd_trainer\n      datasets:\n"
                     "        - folder_path: main\n          resolution: [64, 96]\n"
                     "          control_path:\n            - control_1\n            - control_2\n", "edit.yaml")


WAYS: list[Callable[[Path], Recipe]] = [
    source_key, recipe_key, option, numbered, inside, tarred_targets, musubi_lines, edit_image_list, absolute_paths,
    csv_columns, csv_list, parquet_lists, tar_members, found_by_init, kohya_conditions, musubi_directory,
    musubi_json_lines, simpletuner_conditioning, ai_toolkit_controls]
ALL_PNG = (numbered, kohya_conditions, musubi_directory)


def written(root: Path, text: str) -> Recipe:
    (root / "dataset.toml").write_text(text)
    return load_recipe(root / "dataset.toml", choices={})


def surveyed(recipe: Recipe) -> Ingested:
    return ingest(recipe, Memo(None), jobs=1)


def known(recipe: Recipe) -> dict[str, KnownItem]:
    """The usable items by stem; no finding is made."""
    found = surveyed(recipe)
    assert not found.findings
    return {Path(item.item.name).stem: item for item in found.items}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_gives_the_same_items(way, tmp_path):
    found = known(way(tmp_path / "given"))
    expected = known(source_key(tmp_path / "plain"))
    assert found.keys() == expected.keys() == {"kitten", "puppy"}
    for name, item in found.items():
        assert [one.size for one in item.references] == [SIZES[name, 0], SIZES[name, 1]]
        assert item.picture == expected[name].picture and item.captions == expected[name].captions
        if way not in ALL_PNG:
            assert [one.picture for one in item.references] == [one.picture for one in expected[name].references]
        assert [one.blob for one in item.references] == list(item.item.references)


def test_masks_of_sd_scripts_stay_masks(tmp_path):
    """With masked_loss, and in a data set's file alone, conditioning_data_dir has masks."""
    kohya_conditions(tmp_path)
    (tmp_path / "dataset.toml").unlink()
    (tmp_path / "train.toml").unlink()
    config = json.loads((tmp_path / "kohya.json").read_text()) | {"masked_loss": True}
    for text, name in ((json.dumps(config), "kohya.json"), ((tmp_path / "set.toml").read_text(), "set.toml")):
        recipe = converted(tmp_path, text, name)
        assert (recipe.mask_of(0), recipe.references_of(0)) == (tmp_path / "control", None)


def test_subdirectories_correspond_and_a_flat_directory_serves_all_of_them(tmp_path):
    for place in ("a", "b"):
        draw(tmp_path / "main" / place / "0.png", (96, 96), seed=len(place)).with_suffix(".txt").write_text("words")
        reference(tmp_path / "deep" / place / "0.png", "kitten", 0)
    reference(tmp_path / "flat" / "0.png", "kitten", 1)
    recipe = written(tmp_path, '[[source]]\npath = "main"\nreferences = ["deep", "flat"]\n')
    assert {item.item.name: [one.blob.path.relative_to(tmp_path).as_posix() for one in item.references]
            for item in surveyed(recipe).items} == {"a/0.png": ["deep/a/0.png", "flat/0.png"],
                                                    "b/0.png": ["deep/b/0.png", "flat/0.png"]}
    (tmp_path / "deep/a/0.png").rename(tmp_path / "deep/0.png")  # it may be that of another picture
    assert [(said.path, said.code) for said in surveyed(recipe).findings] == [
        ("deep/0.png", "orphan-reference"), ("a/0.png", "missing-reference")]


def test_a_number_at_the_end_of_another_pictures_name_is_part_of_it(tmp_path):
    for name in ("a", "a_0", "a_1"):
        draw(tmp_path / "main" / f"{name}.png", (96, 96), seed=1).with_suffix(".txt").write_text("words")
        reference(tmp_path / "control" / f"{name}.png", "kitten", 0)
    reference(tmp_path / "control" / "a_1_0.png", "kitten", 1)
    reference(tmp_path / "control" / "a_1_1.png", "puppy", 1)
    found = known(written(tmp_path, '[[source]]\npath = "main"\nreferences = ["control"]\n'))
    assert {name: [one.blob.name for one in item.references] for name, item in found.items()} == {
        "a": ["a.png"], "a_0": ["a_0.png"], "a_1": ["a_1.png", "a_1_0.png", "a_1_1.png"]}


def test_a_source_beside_each_picture_is_its_reference(tmp_path):
    """Where some picture has none, these may be pictures themselves: nothing is guessed."""
    root = targets(tmp_path / "pairs")
    for name in ("kitten", "puppy"):
        reference(root / f"{name}.source.jpg", name, 1)
    assert {name: [one.size for one in item.references] for name, item in known(load_recipe(root, choices={})).items()
            } == {"kitten": [SIZES["kitten", 1]], "puppy": [SIZES["puppy", 1]]}
    (root / "puppy.source.jpg").unlink()
    names = {item.name: len(item.references) for item in list_recipe(load_recipe(root, choices={})).items}
    assert names == {"kitten.png": 0, "kitten.source.jpg": 0, "puppy.png": 0}
    lone = [member(path.name, path.read_bytes()) for path in sorted(root.iterdir())]
    (tmp_path / "pairs.tar").write_bytes(tar_of(lone))  # where no member of such a name was ever a picture
    names = {item.name: len(item.references) for item in list_recipe(load_recipe(tmp_path / "pairs.tar", choices={})
                                                                     ).items}
    assert names == {"pairs.tar/kitten.png": 1, "pairs.tar/puppy.png": 0}


@pytest.mark.parametrize("way", [musubi_lines, tar_members], ids=lambda way: way.__name__)
def test_directories_of_the_recipe_go_before_what_a_source_has_and_an_empty_list_before_both(way, tmp_path):
    path = way(tmp_path).sources[0].path
    (tmp_path / "own").mkdir()
    for name in ("kitten", "puppy"):
        draw(tmp_path / "own" / f"{name}.png", (70, 70), seed=4)
    for folders_, sizes in ((("own",), [[(70, 70)], [(70, 70)]]), ((), [[], []])):
        recipe = load_recipe(path, choices={"references": tuple(tmp_path / name for name in folders_)})
        assert [[one.size for one in item.references] for item in known(recipe).values()] == sizes


def test_a_picture_that_a_row_names_as_reference_is_a_sample_only_with_a_row_or_caption_of_its_own(tmp_path):
    root = targets(tmp_path / "all")
    reference(root / "before.png", "kitten", 0)
    row = {"file_name": "kitten.png", "text": "words", "control_path": "before.png"}
    (root / "metadata.jsonl").write_text(json.dumps(row))
    recipe = load_recipe(root, choices={})
    assert set(known_despite_captions(recipe)) == {"kitten", "puppy"}
    own = json.dumps({"file_name": "before.png", "text": "too"})
    (root / "metadata.jsonl").write_text(f"{json.dumps(row)}\n{own}")
    assert set(known_despite_captions(recipe)) == {"before", "kitten", "puppy"}
    (root / "metadata.jsonl").write_text(json.dumps(row))
    (root / "before.txt").write_text("a sample")
    assert set(known_despite_captions(recipe)) == {"before", "kitten", "puppy"}


def known_despite_captions(recipe: Recipe) -> dict[str, KnownItem]:
    """The usable items by stem; captions of rows may be unused."""
    found = surveyed(recipe)
    assert {said.code for said in found.findings} <= {"second-caption"}
    return {Path(item.item.name).stem: item for item in found.items}


@pytest.mark.parametrize("value, said", [
    ("../other.png", "names '../other.png', expected a path inside the source"),
    ("/etc/other.png", "names '/etc/other.png', expected a path inside the source"),
    (["a.png", 5], "names '5' as a reference, expected a path"),
    ({"path": "a.png"}, "as a reference, expected a path"),
    ([f"{number}.png" for number in range(101)], "names 101 references, expected at most 100")])
def test_a_row_with_a_bad_reference_is_a_finding_and_its_picture_not_used(tmp_path, value, said):
    root = targets(tmp_path / "all")
    (root / "kitten.txt").unlink()
    (root / "metadata.jsonl").write_text(json.dumps({"file_name": "kitten.png", "text": "words", "references": value}))
    found = surveyed(load_recipe(root, choices={"caption.missing": "reject"}))
    assert [item.item.name for item in found.items] == ["puppy.png"]
    assert {one.code for one in found.findings} == {"bad-table", "missing-caption"} and said in found.findings[0].detail


def test_a_reference_that_a_row_names_and_that_does_not_exist_is_told(tmp_path):
    recipe = musubi_lines(tmp_path)
    (tmp_path / "all" / "control_2" / "puppy.jpg").unlink()
    (error,) = surveyed(recipe).findings
    assert (error.path, error.code) == ("puppy.png", "unreadable-file")
    assert error.detail == "its reference control_2/puppy.jpg cannot be read: No such file or directory"


@pytest.mark.parametrize("spoil, code, detail", [
    (lambda path: path.write_bytes(b""), "empty-file", "its reference control_1/kitten.png: "),
    (lambda path: path.write_bytes(path.read_bytes()[:40]), "truncated", "its reference control_1/kitten.png: "),
    (lambda path: path.write_text("<html>"), "not-an-image", "its reference control_1/kitten.png: "),
    (lambda path: path.unlink(), "missing-reference", "no reference of its name in control_1"),
    (lambda path: draw(path, (80, 80), seed=1, alpha=True), "has-alpha", "its reference control_1/kitten.png: "),
], ids=["empty", "truncated", "no picture", "missing", "transparent"])
def test_what_is_wrong_with_a_reference_is_said_of_the_picture_which_is_not_used(tmp_path, spoil, code, detail):
    recipe = source_key(tmp_path)
    (tmp_path / "dataset.toml").write_text('[image]\nalpha = "reject"\n' + (tmp_path / "dataset.toml").read_text())
    spoil(tmp_path / "control_1" / "kitten.png")
    found = surveyed(load_recipe(recipe.file, choices={}))
    assert [item.item.name for item in found.items] == ["puppy.png"]
    (error,) = found.findings
    assert (error.path, error.code, error.severity) == ("kitten.png", code, "error")
    assert error.detail.startswith(detail)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_reference_that_cannot_be_read_may_be_readable_in_the_next_run(tmp_path):
    recipe = source_key(tmp_path)
    (tmp_path / "control_1" / "kitten.png").chmod(0)
    found = surveyed(recipe)
    (error,) = found.findings
    assert (error.code, found.failed) == ("unreadable-file", True)


def test_a_recipe_may_train_pictures_without_the_references_that_they_lack(tmp_path):
    recipe = source_key(tmp_path)
    draw(tmp_path / "main" / "plain.png", (96, 96), seed=7).with_suffix(".txt").write_text("words")
    (tmp_path / "control_1" / "kitten.png").unlink()
    assert {one.path for one in surveyed(recipe).findings} == {"kitten.png", "plain.png"}
    lenient = written(tmp_path, (tmp_path / "dataset.toml").read_text() + 'missing_reference = "none"\n')
    counts = {name: len(item.references) for name, item in known(lenient).items()}
    assert counts == {"kitten": 1, "plain": 0, "puppy": 2}
    assert known(load_recipe(tmp_path / "main", choices=choices_of(
        {"references": [tmp_path / "control_1"], "missing_reference": "none"}))).keys() == counts.keys()
    everything = written(tmp_path, '[references]\nfrom = ["control_1"]\nmissing = "none"\n[[source]]\npath = "main"\n')
    assert known(everything).keys() == counts.keys()


@pytest.mark.parametrize(("references", "said"), [
    (("ref.png", None), ["note: main: 1 of 2 pictures have no references, and train without any"]),
    (("ref.png", "ref.png"), []), ((None, None), [])])
def test_pictures_without_references_beside_others_with_them_are_counted(tmp_path, references, said):
    """Rows and members of tars may leave them out, and their pictures are used."""
    main = targets(tmp_path / "main")
    if any(references):
        draw(main / "ref.png", (80, 72), seed=90)
    rows = [{"file_name": f"{name}.png", "text": name, "references": reference} for name, reference in zip(
        ("kitten", "puppy"), references, strict=True)]
    (main / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = written(tmp_path, '[[source]]\npath = "main"\n')
    placed = Assignments(rules=(), buckets=(), pictures=(), findings=(), merges=())
    notes = dataset_notes(recipe, surveyed(recipe), placed)
    assert [note for note in notes if "references, and train" in note] == said


def test_references_without_a_picture_are_said_unless_another_source_has_it(tmp_path):
    targets(tmp_path / "main")
    folders(tmp_path)
    draw(tmp_path / "control_1" / "other.png", (64, 64), seed=3)
    draw(tmp_path / "control_1" / "kitten.jpg", (64, 64), seed=3)
    one = '[[source]]\npath = "main"\nreferences = ["control_1"]\n'
    assert [(said.path, said.code) for said in list_recipe(written(tmp_path, one)).findings] == [
        ("control_1/other.png", "orphan-reference"), ("control_1/kitten.png", "second-reference")]
    draw(tmp_path / "more" / "other.png", (64, 64), seed=3)
    both = one + '[[source]]\npath = "more"\nreferences = ["control_1"]\n'
    assert [said.code for said in list_recipe(written(tmp_path, both)).findings] == ["second-reference"]


@pytest.mark.parametrize("change", [
    lambda path: draw(path, (88, 88), seed=5), lambda path: path.rename(path.with_name("cat.png")),
    lambda path: path.unlink(), lambda path: path.rename(path.with_suffix(".webp")),
    lambda path: draw(path.with_name("kitten_1.png"), (64, 64), seed=9)],
    ids=["edited", "renamed", "removed", "other extension", "one more"])
def test_the_next_run_notices_a_change_of_a_reference(tmp_path, monkeypatch, change):
    monkeypatch.setattr(memo, "REST_NS", 0)
    recipe = source_key(tmp_path)
    facts = Memo(None)
    before, first = list_recipe(recipe, stamped=True), ingest(recipe, facts, jobs=1)
    assert before.digest == list_recipe(recipe, stamped=True).digest != ""
    change(tmp_path / "control_1" / "kitten.png")
    after, second = list_recipe(recipe, stamped=True), ingest(recipe, facts, jobs=1)
    assert after.digest != before.digest
    assert first.items[1] == second.items[-1]
    assert [one.references for one in first.items[:1]] != [one.references for one in second.items[:-1]]


def test_one_reference_of_several_pictures_is_read_once(tmp_path, monkeypatch):
    targets(tmp_path / "main")
    for name in ("kitten", "puppy"):
        (tmp_path / "main" / name).mkdir()
        (tmp_path / "main" / f"{name}.png").rename(tmp_path / "main" / name / "0.png")
        (tmp_path / "main" / f"{name}.txt").rename(tmp_path / "main" / name / "0.txt")
    reference(tmp_path / "control" / "0.png", "kitten", 0)
    monkeypatch.setattr(memo, "REST_NS", 0)
    recipe = written(tmp_path, '[[source]]\npath = "main"\nreferences = ["control"]\n')
    read = FactReader.read
    sizes: list[int] = []
    monkeypatch.setattr(FactReader, "read", lambda self, kind, data: sizes.append(len(data)) or read(self, kind, data))
    first, second = surveyed(recipe).items
    assert first.references == second.references and len(first.references) == 1
    assert sizes.count((tmp_path / "control" / "0.png").stat().st_size) == 1


@pytest.mark.parametrize("value, error", [
    ('"control"', "source[0].references is 'control', expected a list of directories"),
    ('["nowhere"]', "expected existing directories"),
    ('["main"]', "the source itself, whose pictures would be their own references"),
    ('["control", "control"]', "'control' twice, expected each directory once"),
    ('[""]', "source[0].references has '', expected directories"),
    ('[1]', "source[0].references[0] is 1, expected a string")])
def test_a_bad_setting_is_told(tmp_path, value, error):
    targets(tmp_path / "main")
    (tmp_path / "control").mkdir()
    with pytest.raises(ConfigError, match=error.replace("[", r"\[").replace("]", r"\]")):
        written(tmp_path, f'[[source]]\npath = "main"\nreferences = {value}\n')


def test_a_recipe_and_a_command_keep_the_directories_and_their_order(tmp_path):
    for name in ("a", "b", "main", "more"):
        (tmp_path / name).mkdir()
    recipe = written(tmp_path, '[references]\nfrom = ["b", "a"]\nmissing = "none"\n[[source]]\npath = "main"\n'
                     'references = []\n[[source]]\npath = "more"\nmissing_reference = "reject"\n')
    assert recipe.references_of(0) == () and recipe.missing_reference_of(0) == "none"
    assert [path.name for path in recipe.references_of(1)] == ["b", "a"]
    assert recipe.missing_reference_of(1) == "reject"
    (tmp_path / "dataset.toml").write_text(render_recipe(recipe, base=tmp_path))
    again = load_recipe(tmp_path / "dataset.toml", choices={})
    assert (again.references, again.missing_reference, again.sources) == (
        recipe.references, recipe.missing_reference, recipe.sources)
    for named in ([tmp_path / "a", tmp_path / "b"], [Path("none")]):
        asked = load_recipe(tmp_path / "dataset.toml", choices=choices_of({"references": named}))
        assert given_by(asked.options)["references"] == [str(path) if path == Path("none") else path for path in named]
        assert asked.references == (() if len(named) == 1 else tuple(named))
        assert api.read_recipe(tmp_path / "dataset.toml", {"references": named}) == asked
