"""Decodes and scales pictures for engines, in worker processes: a file that crashes its decoder costs one finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prep.captioning.engine import Form, Prepared
from prep.images.decode import decode_picture, quiet_pillow
from prep.images.formats.parts import BadPicture
from prep.images.thumbnail import encode_jpeg, shrink, white_square
from prep.workers.service import Service, Task

QUALITY = 90  # of the JPEG that is sent: a photo of 1024 pixels takes 200 kB
BYTES_PER_PIXEL = 0.25  # of such a JPEG, about: photos take 0.15 to 0.35


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    """The bytes of a picture file, and the form in which an engine wants the picture."""

    data: bytes
    side: int  # pixels of the longer side, at most; of a square, of each side
    alpha: str  # color that replaces transparency
    form: Form


@dataclass(frozen=True, slots=True)
class PictureAnswer:
    """The picture, or the code and detail of the finding on a file that is none."""

    picture: Prepared | None = None
    code: str = ""
    detail: str = ""


def _prepare(question: PictureQuestion) -> Iterator[PictureAnswer]:
    try:
        picture = decode_picture(question.data, alpha=question.alpha)
        pixels = (white_square if question.form == "square" else shrink)(picture, question.side)
    except BadPicture as error:
        yield PictureAnswer(code=error.code, detail=error.detail)
        return
    data = encode_jpeg(pixels, QUALITY) if question.form == "jpeg" else pixels.tobytes()
    yield PictureAnswer(Prepared(data=data, width=pixels.shape[1], height=pixels.shape[0]))


PREPARE = Task(name="prepare", question=PictureQuestion, part=PictureAnswer, work=_prepare)
SERVICE = Service(module=__name__, tasks=(PREPARE,), prepare=quiet_pillow)
