"""A tagger that the tests make: WD14's layout, and weights of a few numbers that can be calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE = 32
HEADER = "tag_id,name,category,count"
# (name, category), and how blue, green and red a picture is must weigh for it, with what is added.
TAGS = (("general", 9, (0, 0, 0), 1.0), ("explicit", 9, (0, 0, 0), -4.0),
        ("long_hair", 0, (4, 0, 0), -2.0), ("grey_background", 0, (0, 4, 0), -2.0), ("^_^", 0, (0, 0, 4), -2.0),
        ("1girl", 0, (1, 1, 1), 0.0), ("rin_(some_series)", 4, (0, 0, 8), -1.0), ("rare", 0, (0, 0, 0), -9.0),
        ("of_an_artist", 1, (9, 9, 9), 9.0))


def build(folder: Path, *, tags: Sequence[tuple[Any, ...]] = TAGS, batch: int | None = None, side: int = SIDE,
          **differs: Any) -> Path:
    """A directory with model.onnx and selected_tags.csv; `batch`: pictures at a time, if the model takes no other
    number. `differs`: `nodes`, `shape` or `kind` of the model's input."""
    folder.mkdir(parents=True)
    lines = [HEADER, *(f'{number},"{name}",{category},{100 - number}' for number, (name, category, *_) in
                       enumerate(tags))]
    (folder / "selected_tags.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    onnx.save(model_of(tags, batch, side, **differs), folder / "model.onnx")
    return folder


def model_of(tags: Sequence[tuple[Any, ...]] = TAGS, batch: int | None = None, side: int = SIDE, *,
             shape: Sequence[Any] | None = None, kind: int = TensorProto.FLOAT, end: str = "Sigmoid") -> Any:
    """The mean of each color / 255, times weights, plus a bias, through `end`."""
    weights = np.array([weight for _, _, weight, _ in tags], np.float32).T / 255
    bias = np.array([added for *_, added in tags], np.float32)
    nodes = [helper.make_node("ReduceMean", ["picture", "axes"], ["means"], keepdims=0),
             helper.make_node("Gemm", ["means", "weights", "bias"], ["sums"]),
             helper.make_node(end, ["sums"], ["scores"])]
    given = helper.make_tensor_value_info("picture", kind, shape or [batch or "batch", side, side, 3])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch or "batch", len(tags)])
    graph = helper.make_graph(nodes, "tagger", [given], [made], [
        numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(bias, "bias"),
        numpy_helper.from_array(np.array([1, 2], np.int64), "axes")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def scores_of(pixels: np.ndarray[Any, Any], tags: Sequence[tuple[Any, ...]] = TAGS) -> dict[str, float]:
    """What the tagger must say of a picture, uint8 [H, W, 3] in RGB: of the white square around it, by hand."""
    height, width = pixels.shape[:2]
    longer = max(height, width)
    square = np.full((longer, longer, 3), 255.0)
    top, left = (longer - height) // 2, (longer - width) // 2
    square[top:top + height, left:left + width] = pixels
    red, green, blue = square.mean((0, 1)) / 255
    return {name: float(1 / (1 + np.exp(-(np.dot(weight, (blue, green, red)) + added))))
            for name, _, weight, added in tags}
