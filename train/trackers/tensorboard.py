"""A run's numbers and sample pictures for TensorBoard, in RUN/tensorboard: the room of the library `tensorboard`."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

from prep.fs.untrusted import read_regular
from prep.runs.events import Event
from prep.runs.sheets import MOST
from train.trackers.numbers import numbers

FOLDER = "tensorboard"
FLUSHED = 1.0  # seconds after which what was written is flushed: a killed run loses no more
RGBA = 6  # the color type of a PNG, which the header has at byte 25


class TensorBoard:
    """Writes the events of a run. Those of steps after `step`, which a resumed run repeats, are taken back first."""

    def __init__(self, run: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._run, self._record, self._summary = run, Record, Summary
        self._writer = EventFileWriter(str(run / FOLDER))
        self._flushed = time.monotonic()
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Record(wall_time=time.time(), step=step + 1, session_log=session))

    def __call__(self, event: Event) -> None:
        """Writes one event."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers(event)]
        if event["event"] == "sample":
            values.append(self._picture(self._run / event["picture"]))
        if values:
            self._writer.add_event(self._record(wall_time=time.time(), step=event["step"],
                                                summary=self._summary(value=values)))
        if time.monotonic() - self._flushed > FLUSHED or event["event"] == "checkpoint":
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        self._writer.close()

    def _picture(self, path: Path) -> Any:
        data = read_regular(path, MOST)
        width, height = struct.unpack(">II", data[16:24])  # of the first chunk of a PNG
        colors = 4 if data[25] == RGBA else 3
        image = self._summary.Image(width=width, height=height, colorspace=colors, encoded_image_string=data)
        return self._summary.Value(tag="samples", image=image)
