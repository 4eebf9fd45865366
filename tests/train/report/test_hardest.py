"""`train worst`: the samples that were learned least, whatever their timesteps."""

from __future__ import annotations

import numpy as np
import pytest

from prep.errors import CacheError, ManifestError
from prep.fs.place import Local
from prep.loader.index import open_index
from prep.runs.losses import HEAD, NAME, RECORD, adjusted
from train.report.hardest import find_worst
from train.runs.losses import ids_of


def records_of(index, showings, hard=(), seed=0):
    """Losses that fall with the timestep, as those of noise do; twice as high for the samples `hard`."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(len(index.samples), size=showings)
    found = np.zeros(showings, RECORD)
    found["step"], found["timestep"] = np.arange(showings) // 4 + 1, rng.integers(1000, size=showings)
    found["loss"] = (1.1 - found["timestep"] / 1000) * rng.uniform(0.9, 1.1, showings)
    found["loss"][np.isin(samples, hard)] *= 2
    found["id"] = ids_of(index)[samples]
    return samples, found


@pytest.fixture
def trained(make, train, tmp_path):
    """A run of one step, its index, and a function that replaces its losses."""
    made = make(counts=(6, 6))
    done = train("run", made.path, "-o", tmp_path / "run", "--steps", 1, "--device", "cpu", "--set", "lora.rank=2",
                 "--set", "sample.every=0", "--set", "validation.every=0")
    assert done.code == 0, done.err

    def put(records):
        (tmp_path / "run" / NAME).write_bytes(HEAD + records.tobytes())
        return tmp_path / "run"

    return made, open_index(made.manifest), put


def test_a_loss_is_compared_with_those_at_its_timestep(make):
    """By hand: 2000 records in 20 bins of about 100, by the order of their timesteps."""
    _, records = records_of(open_index(make().manifest), 2000)
    found = adjusted(records)
    edges = np.quantile(records["timestep"], [number / 20 for number in range(1, 20)])
    for number in range(0, 2000, 97):
        place = sum(records["timestep"][number] >= edge for edge in edges)
        inside = [loss for loss, at in zip(records["loss"], records["timestep"], strict=True)
                  if sum(at >= edge for edge in edges) == place]
        assert found[number] == pytest.approx(records["loss"][number] / np.mean(inside), rel=1e-5)
    assert found.mean() == pytest.approx(1)


def test_few_records_and_losses_of_0_are_compared_all_the_same():
    one = np.array([(1, 5, 0.5, 1), (1, 900, 1.5, 2)], RECORD)
    assert adjusted(one).tolist() == [0.5, 1.5]
    assert adjusted(np.array([(1, 5, 0.0, 1)], RECORD)).tolist() == [1.0]


def test_the_hard_samples_come_first(trained):
    _, index, put = trained
    samples, records = records_of(index, 1200, hard=[3, 7])
    found = find_worst(Local(put(records)), 5)
    assert [each.name for each in found.samples[:2]] in ([index.samples.name(a), index.samples.name(b)]
                                                        for a, b in ((3, 7), (7, 3)))
    assert len(found.samples) == 5 and found.showings == 1200 and found.known == len(index.samples)
    assert found.samples[1].ratio > 1.5 > 1 > found.samples[2].ratio
    hardest = next(sample for sample in (3, 7) if index.samples.name(sample) == found.samples[0].name)
    assert found.samples[0].showings == int((samples == hardest).sum())
    assert found.samples[0].loss == pytest.approx(records["loss"][samples == hardest].mean(), rel=1e-5)


def test_samples_that_left_the_manifest_are_not_listed(trained):
    _, index, put = trained
    _, records = records_of(index, 40)
    records["id"][:30] = 12345
    found = find_worst(Local(put(records)), 100)
    assert found.showings == 10 and len(found.samples) == found.known <= 10


def test_a_run_without_losses_is_told(trained):
    _, _, put = trained
    run = put(np.zeros(0, RECORD))
    with pytest.raises(CacheError) as caught:
        find_worst(Local(run), 20)
    assert caught.value.message.startswith(f"{run} has no losses of samples in ")
    assert caught.value.message.endswith("/m.json") and "earlier versions kept none" in caught.value.hint


def test_paths_can_be_pasted_into_a_shell(trained, train, monkeypatch):
    made, index, put = trained
    _, records = records_of(index, 400, hard=[2])
    run = put(records)
    path = made.root / "photos" / index.samples.name(2)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    monkeypatch.chdir(made.root)
    head, first, second, *_ = train("worst", run, "-n", 3).out.splitlines()
    assert head.split() == ["ratio", "loss", "shown", "picture"]
    assert first.endswith(f"  photos/{index.samples.name(2)}") and second.split()[-1].startswith(("64/", "80/"))
    found = train("worst", run, "-n", 1, "--json").json
    assert found["samples"][0]["path"] == f"photos/{index.samples.name(2)}" and found["samples"][0]["ratio"] > 1.4


def test_the_run_s_own_copy_of_its_manifest_counts(trained):
    """Not another one that was written in its place since, nor that it is gone; without its tables, what is there."""
    made, index, put = trained
    samples, records = records_of(index, 400)
    folder = put(records)
    before = find_worst(Local(folder), 3)
    assert before.known == len(np.unique(samples))
    made.path.write_text("{}")
    assert find_worst(Local(folder), 3) == before
    with pytest.raises(ManifestError):
        find_worst(Local(folder), 3, made.path)
    made.path.unlink()
    assert find_worst(Local(folder), 3) == before
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(CacheError, match="is gone: "):
        find_worst(Local(folder), 3)
