"""The picture of the loss: where its lines are, and that a resumed run draws the same."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from runs import events, go

from prep.pages.charts import ticks
from prep.runs.history import smoothed
from train import loop
from train.runs.loss_plot import BAND, HELD_OUT, LINE, loss_png

QUICK = {"validation": {"every": 2, "timesteps": 1}, "sample": {"every": 0}, "batch_size": 4, "lora": {"rank": 2}}


def opened(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def pixels(picture, color):
    """Where the picture has exactly this color, without the legend."""
    wanted = tuple(int(color[at:at + 2], 16) for at in (1, 3, 5))
    return [(x, y) for y in range(30, picture.height) for x in range(picture.width)
            if picture.getpixel((x, y)) == wanted]


def test_losses_are_where_they_belong():
    losses = [(step, (2.0 if step <= 500 else 1.0) + step % 2 / 10) for step in range(1, 1001)]
    picture = opened(loss_png(losses, [(1000, 1.0)], 1000))
    assert picture.size == (960, 480)
    line = pixels(picture, LINE)
    left, right = ([y for x, y in line if low < x < high] for low, high in ((100, 400), (700, 930)))
    assert max(left) < min(right)  # a larger loss is higher
    (dots, half) = pixels(picture, HELD_OUT), picture.width // 2
    assert dots and min(x for x, _ in dots) > half and pixels(picture, BAND)


def test_outliers_do_not_flatten_the_rest():
    losses = [(step, 1.0 + step % 2) for step in range(1, 1000)] + [(1000, 1e9)]
    ys = [y for _, y in pixels(opened(loss_png(losses[:-1], [], 1000)), BAND)]
    assert max(ys) - min(ys) > 200


def test_without_points_there_are_axes():
    assert opened(loss_png([], [], 0)).size == (960, 480)
    assert opened(loss_png([(1, 0.5)], [], 1)).size == (960, 480)


def test_the_average_has_no_bias():
    assert list(smoothed([(1, 4.0), (2, 4.0)], 10)) == [(1, pytest.approx(4.0)), (2, pytest.approx(4.0))]
    one, two = smoothed([(1, 0.0), (2, 1.0)], 2)
    assert (one[1], two[1]) == (0.0, pytest.approx(2 / 3))


@pytest.mark.parametrize(("low", "high", "wanted"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
                                                     (0, 9, [0, 2, 4, 6, 8]), (0, 0.85, [0, 0.2, 0.4, 0.6, 0.8]),
                                                     (0, 2000, [0, 250, 500, 750, 1000, 1250, 1500, 1750, 2000]),
                                                     (0.093, 0.107, [0.094, 0.096, 0.098, 0.1, 0.102, 0.104, 0.106])])
def test_ticks_are_round(low, high, wanted):
    assert ticks(low, high) == pytest.approx(wanted)


def test_a_resumed_run_draws_the_same(make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, **QUICK, steps=4), tmp_path / "run")
    drawn = (tmp_path / "run" / "loss.png").read_bytes()
    go(setup_of(made, **QUICK, steps=4), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "loss.png").read_bytes() == drawn
    go(setup_of(made, **QUICK, steps=2, log={"plot": False}), tmp_path / "plain")
    assert not (tmp_path / "plain" / "loss.png").exists()


def test_a_plot_that_fails_is_a_warning(make, setup_of, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no font")

    monkeypatch.setattr(loop, "loss_png", fail)
    go(setup_of(make(), **QUICK, steps=2, checkpoint={"every": 1}), tmp_path / "run")
    said = [(event["step"], event["text"]) for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert set(said) == {(step, "no loss.png: ValueError: no font") for step in (1, 2)}
