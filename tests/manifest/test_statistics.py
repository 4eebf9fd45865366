"""Statistics of latents: exact against NumPy over the whole, outliers by hand, and rows that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest

from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.manifest.statistics import FEWEST, latent_statistics, modified_z, outliers


@pytest.fixture
def opened(make):
    """A manifest of 24 random latents in two buckets, and their values by the sample's number."""
    made = make(counts=(12, 12))
    audit = open_manifest(read_manifest(made.path))
    return audit, [made.latents[sample.views[0].latent].astype(np.float64) for sample in made.samples]


def test_the_statistics_are_those_of_all_cells(opened):
    audit, values = opened
    ticks = []
    found = latent_statistics(audit, ticks.append)
    assert found is not None and sum(ticks) == len(values) and found.samples.tolist() == [*range(len(values))]
    cells = np.concatenate([one.reshape(len(one), -1) for one in values], axis=1)
    for mine, right in ((found.mean_C, cells.mean(axis=1)), (found.std_C, cells.std(axis=1)),
                        (found.least_C, cells.min(axis=1)), (found.most_C, cells.max(axis=1)),
                        (found.means_NC, [one.mean(axis=(1, 2)) for one in values]),
                        (found.stds_NC, [one.std(axis=(1, 2)) for one in values])):
        assert np.allclose(mine, right, rtol=1e-10, atol=1e-12)
    facts = audit.manifest.document["latents"]
    scale, shift = float(facts["scaling_factor"]), float(facts["shift_factor"])
    assert np.allclose(found.trained_mean_C, (found.mean_C - shift) * scale)
    assert np.allclose(found.trained_std_C, found.std_C * scale)


def test_of_more_bytes_samples_are_evenly_spread(opened):
    audit, values = opened
    found = latent_statistics(audit, lambda _: None, most_bytes=sum(2 * one.size for one in values) // 4)
    assert found is not None and len(found.samples) == len(values) // 4
    assert found.samples[0] == 0 and found.samples[-1] == len(values) - 1


def test_damaged_rows_are_left_out(opened):
    audit, values = opened
    paths = [path for path in (audit.cache.root / "shards").glob("*/*/latent/c*") if path.is_file()] or [
        path for path in (audit.cache.root / "shards").glob("*/*/latent/c/**/*") if path.is_file()]
    paths[0].chmod(0o600)
    data = bytearray(paths[0].read_bytes())
    data[3] ^= 255
    paths[0].write_bytes(data)
    found = latent_statistics(audit, lambda _: None)
    assert found is not None and len(found.unreadable) == 1
    assert sorted([*found.samples.tolist(), *found.unreadable]) == [*range(len(values))]


def test_latents_that_are_not_finite_are_told(opened, monkeypatch):
    audit, values = opened
    real = __import__("prep.manifest.statistics", fromlist=["values_of"]).values_of

    def broken(spec, data):
        found = real(spec, data).copy()
        found[0, 0, 0, 0] = np.nan
        return found

    monkeypatch.setattr("prep.manifest.statistics.values_of", broken)
    found = latent_statistics(audit, lambda _: None)
    assert found is not None and len(found.not_finite) == 2, "the first of each bucket's shard"
    assert np.isfinite(found.mean_C).all() and len(found.samples) == len(values) - 2


def test_the_modified_z_score_by_hand():
    column = np.array([[1.0], [2.0], [3.0], [4.0], [100.0]])
    assert modified_z(column)[:, 0] == pytest.approx(0.6745 * np.array([-2, -1, 0, 1, 97]))
    half = np.array([[5.0], [5.0], [5.0], [5.0], [9.0]])  # MAD 0: the mean absolute deviation is 0.8
    assert modified_z(half)[:, 0] == pytest.approx([0, 0, 0, 0, 4 / (1.253314 * 0.8)])
    assert modified_z(np.full((5, 2), 3.0)).tolist() == np.zeros((5, 2)).tolist()


def test_the_farthest_samples_come_first(opened):
    audit, _ = opened
    found = latent_statistics(audit, lambda _: None)
    assert found is not None
    found.means_NC[7, 2] += 50
    found.stds_NC[3, 1] = 1e-6
    first, second = outliers(found)[:2]
    assert {(first.sample, first.channel, first.what), (second.sample, second.channel, second.what)} == {
        (7, 2, "mean"), (3, 1, "standard deviation")}
    assert abs(first.score) >= abs(second.score) > 3.5 and first.usual == pytest.approx(np.median(
        found.means_NC[:, 2] if first.what == "mean" else found.stds_NC[:, 1]))


def test_few_samples_have_no_outliers(make):
    made = make(counts=(FEWEST - 1, 0), validation=0)
    found = latent_statistics(open_manifest(read_manifest(made.path)), lambda _: None)
    assert found is not None
    found.means_NC[0] += 1e6
    assert outliers(found) == []
