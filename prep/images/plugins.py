"""Opens HEIC and JPEG XL through Pillow plugins, which are optional extras.

A plugin is imported when the first such picture is met. Its output becomes 8 bits here, by rounding if it returns all
bits. Each picture is decoded by one thread, since there are as many decoders as cores. Importing pillow_jxl registers
it for `Image.open`, which is never called here.
"""

from __future__ import annotations

import io
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from prep.images.formats.heif import check_whole
from prep.images.formats.jxl import codestream, read_basics
from prep.images.formats.parts import BadPicture, NoDecoder, Note

Values = np.ndarray[Any, np.dtype[np.uint16]]

_SRGB_PRIMARIES = {1, 2, 5, 6}  # BT.709, unspecified, and those of BT.601, which hardly differ
_SRGB_CURVES = {1, 2, 6, 13, 14, 15}  # sRGB, unspecified, and the camera curves that all viewers show as sRGB
_PACKAGES = {"PIL": "pillow", "pillow_heif": "pillow-heif", "pillow_jxl": "pillow-jxl-plugin"}


def decoders() -> str:
    """The installed decoders and their versions: another decoder or version may judge a file differently."""
    names = []
    for module, package in _PACKAGES.items():
        if find_spec(module) is not None:
            names.append(package)
            with suppress(PackageNotFoundError):  # installed without package metadata
                names.append(version(package))
    return " ".join(names)


class Extra(ImageFile.ImageFile):
    """A picture that a plugin decodes as a whole, with orientation applied."""

    bits: int  # per channel as stored
    n_frames: int
    notes: tuple[Note, ...] = ()

    def load(self) -> Any:
        if self._im is None:
            picture = self._decode()
            if picture.size != self.size or picture.mode != self.mode:
                raise BadPicture("corrupt-data", f"its header says {_spoken(self)}, its data {_spoken(picture)}")
            self.im = picture.im
        return Image.Image.load(self)

    def _decode(self) -> Image.Image:
        raise NotImplementedError


class HeicFile(Extra):
    """HEIC by libheif, which applies `irot` and `imir`; EXIF's orientation only repeats them."""

    format = "HEIC"

    def _open(self) -> None:
        assert self.fp is not None
        data = self.fp.read()
        check_whole(data)
        try:
            import pillow_heif
            from pillow_heif import options

            options.DECODE_THREADS = 1
            options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False
            opened: Any = pillow_heif.HeifFile
            file = opened(io.BytesIO(data), convert_hdr_to_8bit=False, hdr_to_16bit=False)
        except ImportError:  # also raised if its own library is missing
            raise NoDecoder("HEIC", package="pillow-heif", extra="heic") from None
        self._heif = file[file.primary_index]
        mode = self._heif.mode.partition(";")[0]
        self._mode, self._size = "L" if mode == "I" else mode, self._heif.size
        self.bits, self.n_frames = int(self._heif.info["bit_depth"]), len(file)
        profile = self._heif.info.get("icc_profile")
        if profile:
            self.info["icc_profile"] = profile
        else:
            self.notes = _nclx_notes(self._heif.info.get("nclx_profile") or {})

    def _decode(self) -> Image.Image:
        values = np.asarray(self._heif)
        if values.dtype != np.uint8:
            values = rounded(values, int(self._heif.mode.partition(";")[2]))
        return Image.frombytes(self.mode, values.shape[1::-1], np.ascontiguousarray(values).tobytes())


def _nclx_notes(nclx: dict[str, Any]) -> tuple[Note, ...]:
    """Notes on color spaces named by number (CICP): libheif converts to RGB but stays in that space."""
    primaries, curve = nclx.get("color_primaries", 2), nclx.get("transfer_characteristics", 2)
    if primaries in _SRGB_PRIMARIES and curve in _SRGB_CURVES:
        return ()
    return (("invalid-profile", f"its colors are CICP {primaries}/{curve} without an ICC profile; taken as sRGB"),)


class JxlFile(Extra):
    """JPEG XL by libjxl, which applies the orientation of the codestream. The profile is known once it is decoded."""

    format = "JXL"

    def _open(self) -> None:
        assert self.fp is not None
        self._stream = codestream(self.fp.read())
        basics = read_basics(self._stream)
        try:
            from pillow_jxl import Decoder
        except ImportError:
            raise NoDecoder("JPEG XL", package="pillow-jxl-plugin", extra="jxl") from None
        if basics.animated:
            raise BadPicture("unsupported-format", "is an animated JPEG XL, of which only the last frame is given out")
        if basics.floats or basics.black:
            what = "floats" if basics.floats else "four inks"
            raise BadPicture("odd-colours", f"JPEG XL has {what}, expected integers in RGB or gray")
        self._decoder = Decoder(num_threads=0)
        self._mode, self._size = basics.mode, basics.size
        self.bits, self.n_frames = basics.bits, 1

    def _decode(self) -> Image.Image:
        try:
            _, info, data, profile, _ = self._decoder(self._stream)
        except RuntimeError:  # whatever is wrong, its message suggests another build
            raise BadPicture("corrupt-data", "JPEG XL data are damaged, or end too early") from None
        if profile:
            self.info["icc_profile"] = bytes(profile)
        size, values = (info.width, info.height), bytes(data)
        if len(values) == 2 * size[0] * size[1] * len(self.getbands()):  # gray; of deep colors only the high byte
            values = rounded(np.frombuffer(values, np.uint16), 16).tobytes()
        return Image.frombytes(self.mode, size, values)


def rounded(values: Values, bits: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Values of `bits` bits as 8 bits, rounded and never clipped."""
    most = (1 << bits) - 1
    table = ((510 * np.arange(most + 1) + most) // (2 * most)).astype(np.uint8)
    return table[values]


def _spoken(picture: Image.Image) -> str:
    return f"{picture.width}x{picture.height} {picture.mode}"
