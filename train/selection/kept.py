"""What an evaluation keeps in RUN/evaluation: drawn pictures, and their embeddings.

    KEY.png              a picture; the key names all that decides it: weights, model, settings, prompt, seed
    KEY-VISION.row       its embedding by a vision model, of which VISION is the start of the fingerprint: the SHA-256
                         of the PNG, and the row in float16

Files are written whole or not at all. One that is damaged, or was replaced, is made again.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prep.embedding.rows import Rows
from prep.fs import atomic
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.untrusted import read_regular
from prep.images.decode import Pixels, decode_picture, encode_png
from prep.images.formats.parts import BadPicture

NAME = "evaluation"
MOST = 1 << 30  # bytes of a file
STALE = 86400.0  # seconds after which a partial file is a leftover of a killed process
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The files of an evaluation."""

    folder: Path
    below: str  # the color, #rrggbb or its name, below transparent pixels
    _known: dict[tuple[str, str], Rows] = field(default_factory=dict)  # rows that belong to their pictures

    def begin(self) -> None:
        """Makes the directory, and removes what killed processes left there. Raises `OSError`."""
        make_dirs(self.folder)
        for partial in self.folder.glob(".*.partial"):
            with suppress(FileNotFoundError):
                if time.time() - partial.lstat().st_mtime > STALE:
                    atomic.remove(partial)

    def has(self, key: str, vision: str) -> bool:
        """Whether there is a whole picture: one that its embedding belongs to, or else that can be decoded."""
        return self.row(key, vision) is not None or self.picture(key) is not None

    def picture(self, key: str) -> Pixels | None:
        """A picture, uint8 [H, W, 3]; `None` if there is none that can be decoded."""
        with suppress(OSError, BadPicture):
            return np.asarray(decode_picture(read_regular(self._png(key), MOST), alpha=self.below))
        return None

    def put_picture(self, key: str, pixels: Pixels) -> None:
        """Keeps a picture, uint8 [H, W, 3], or [H, W, 4] with opacity."""
        for name in [name for name in self._known if name[0] == key]:
            del self._known[name]
        write_atomic(self._png(key), encode_png(pixels))

    def row(self, key: str, vision: str) -> Rows | None:
        """The embedding of a picture, float16 [D]; `None` if there is none of what the picture is now. A picture is
        read only the first time."""
        if (known := self._known.get((key, vision))) is not None:
            return known
        with suppress(OSError):
            data = read_regular(self._row(key, vision), MOST)
            row = np.frombuffer(data[_DIGEST:], np.float16) if len(data) % 2 == 0 else np.zeros(0, np.float16)
            whole = abs(float(np.linalg.norm(row.astype(np.float64))) - 1) < 0.1  # of length 1, but for rounding
            if whole and data[:_DIGEST] == self._digest(key):
                self._known[key, vision] = row
                return row
        return None

    def put_row(self, key: str, vision: str, row: Rows) -> None:
        """Keeps the embedding of a picture, float16 [D] of length 1."""
        write_atomic(self._row(key, vision), self._digest(key) + row.tobytes())
        self._known[key, vision] = row

    def _digest(self, key: str) -> bytes:
        return hashlib.sha256(read_regular(self._png(key), MOST)).digest()

    def _png(self, key: str) -> Path:
        return self.folder / f"{key}.png"

    def _row(self, key: str, vision: str) -> Path:
        return self.folder / f"{key}-{vision[:16]}.row"
