"""Which class opens which format. They are called directly: `Image.open` asks all and warns of some."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from prep.images.plugins import HeicFile, JxlFile

OPENERS: Mapping[str, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile, "PNG": PngImageFile, "WEBP": WebPImageFile, "BMP": BmpImageFile, "TIFF": TiffImageFile,
    "GIF": GifImageFile, "AVIF": AvifImageFile, "HEIC": HeicFile, "JXL": JxlFile,
}
