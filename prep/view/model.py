"""Shows what the model of a cache does with captions and latents: tokens, those that are cut off, and the decode.

Of the text encoders only the tokenizers are loaded; the VAE is loaded when a latent is first decoded, on the CPU in
float32.
"""

from __future__ import annotations

from contextlib import closing
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from prep.errors import ModelError
from prep.fs.memo import Memo, memo_path
from prep.images.decode import encode_png
from prep.manifest.document import Manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import options_of
from prep.models.files import Model
from prep.models.fingerprint import RememberedDigest, text_fingerprint, vae_fingerprint
from prep.models.loading import quiet_libraries
from prep.models.text.truncation import Reading, TruncationFinder
from prep.models.vae import VaeDecoder

NAMES = {"vae": "VAE", "text": "text encoder"}


class ViewedModel:
    """The model in `folder`. Threads may share it. Raises `ModelError` unless it is the one that made the manifest."""

    def __init__(self, folder: Model, manifest: Manifest) -> None:
        quiet_libraries()
        self._folder, self._lock = folder, Lock()
        for name, digest in _fingerprints(folder).items():
            if digest != (wanted := manifest.document["models"][name]):
                raise ModelError(f"the {NAMES[name]} of {folder} did not make this cache: it is {digest[:12]}, "
                                 f"expected {wanted[:12]}", hint="pass the model that encoded the cache: --model")
        family, context = FAMILIES[manifest.family], manifest.fields["text"].context
        self._finder = TruncationFinder(folder, family, options_of(context))

    def readings(self, caption: str) -> list[Reading]:
        """The readings of a caption, one by each text encoder."""
        with self._lock:  # tokenizers are not made for several threads
            return self._finder.readings(caption)

    def decode(self, latent_Chw: np.ndarray[Any, Any]) -> bytes:
        """The picture of a latent as it is stored, a PNG. Raises `ModelError`, `OutOfMemoryError`."""
        with self._lock:
            pixels_HW3 = self._vae.decode(latent_Chw)
        return encode_png(pixels_HW3)

    @cached_property
    def _vae(self) -> VaeDecoder:
        return VaeDecoder(self._folder, device="cpu")


def _fingerprints(folder: Model) -> dict[str, str]:
    """The fingerprints of a model's encoders; digests of unchanged files are remembered, as `train check` does."""
    with closing(Memo(memo_path("models", "1"))) as memo:
        digest = RememberedDigest(memo, "sha256", "sha256")
        return {"vae": vae_fingerprint(folder, digest), "text": text_fingerprint(folder, digest)}
