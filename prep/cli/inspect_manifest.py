"""`prep inspect`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width
from prep.fs.place import maybe_place, place_of
from prep.models.files import Model

if TYPE_CHECKING:
    from prep.manifest.opened import OpenedManifest
    from prep.report.snapshots.gallery import Decoded
    from prep.report.snapshots.manifest import CaptionTokens, Measurements

COUNTED = 50_000  # samples whose captions' tokens are counted: a few seconds
DECODED = 24  # samples, if --model is given without --decode
Cards = Annotated[int, typer.Option(help="with --html: samples in the gallery; more have smaller pictures", min=1,
                                    max=10_000)]
Decode = Annotated[int | None, typer.Option(help="with --html: decode the latents of so many samples with the VAE, and "
                                            f"show them beside the originals with PSNR, lowest first (default: 0; "
                                            f"with --model {DECODED})", min=0, max=1000, show_default=False)]
ModelOpt = Annotated[str | None, typer.Option(help="with --html: model directory, file or Hub id, for its VAE and "
                                              "tokenizers (default: the manifest's)")]


def inspect(
    manifest: opt.ManifestArg, cache: opt.MovedCache = None,
    sample: Annotated[str | None, typer.Option(help="show everything about the sample of this name")] = None,
    html: Annotated[Path | None, typer.Option(help="write a self-contained HTML page with plots and a gallery")] = None,
    cards: Cards = 10_000, decode: Decode = None, model: ModelOpt = None, device: opt.Device = "cpu",
    download: opt.Download = False, every: opt.Every = False, as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show what a manifest holds: fields, shapes, buckets, models, findings."""
    from prep.manifest.describe import describe_manifest, describe_samples
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.models.device.named import require_device
    from prep.report.terminal.manifest import inspect_tables, sample_text

    require_device(device)
    opened = open_manifest(read_manifest(place_of(manifest), cache=maybe_place(cache)))
    if html is not None:
        most = decode if decode is not None else DECODED if model is not None else 0
        _write_page(opened, html, cards, _Model(opened, model, device, download), most, shown=not quiet)
    document = describe_manifest(opened) if sample is None else describe_samples(opened, sample)
    if as_json:
        put_json(document)
    elif html is None or sample is not None:
        width = screen_width()
        put(sample_text(document, width=width) if sample is not None else
            inspect_tables(document, width=width, every=every))


def _write_page(opened: OpenedManifest, html: Path, cards: int, model: _Model, most: int, *, shown: bool) -> None:
    from prep.cli.ticker import progress
    from prep.images.decode import quiet_pillow
    from prep.report.snapshots.manifest import check_page, write_page

    quiet_pillow()
    check_page(opened, html)
    measured = _measured(opened, model, most, shown=shown)
    with progress("making thumbnails", min(cards, len(opened.samples)), unit="samples", shown=shown) as tick:
        write_page(opened, html, date.today(), cards=cards, measured=measured, tick=tick)
    say(f"wrote {html}")


def _measured(opened: OpenedManifest, model: _Model, most: int, *, shown: bool) -> Measurements:
    """Statistics of latents, lengths of captions, and decoded latents."""
    from prep.cli.ticker import progress
    from prep.manifest.statistics import latent_statistics, outliers
    from prep.report.snapshots.manifest import Measurements

    with progress("reading latents", len(opened.samples), unit="samples", shown=shown) as tick:
        statistics = latent_statistics(opened, tick)
    unusual = [] if statistics is None else outliers(statistics)
    with progress("counting tokens", None, shown=shown):
        tokens = model.tokens()
    decoded, note = model.decoded(most, [outlier.sample for outlier in unusual], shown=shown) if most else ({}, "")
    return Measurements(latents=statistics, outliers=unusual, tokens=tokens, decoded=decoded, decoded_note=note)


class _Model:
    """The model that a page uses: the manifest's, or the one that was named."""

    def __init__(self, opened: OpenedManifest, named: str | None, device: str, download: bool) -> None:
        self._opened, self._named, self._device, self._download = opened, named, device, download

    def _place(self) -> Model:
        from prep.models.hub import locate

        return locate(self._named if self._named is not None else self._opened.manifest.model, download=self._download)

    def tokens(self) -> CaptionTokens | None:
        """The lengths of captions; `None` if the model is not on this computer, unless it was named."""
        from prep.errors import Problem
        from prep.models.families.registry import FAMILIES
        from prep.models.family import options_of
        from prep.report.snapshots.gallery import spread
        from prep.report.snapshots.manifest import CaptionTokens

        manifest = self._opened.manifest
        try:
            place = self._place()
            from prep.models.loading import quiet_libraries

            quiet_libraries()
            from prep.models.text.truncation import TruncationFinder

            finder = TruncationFinder(place, FAMILIES[manifest.family], options_of(manifest.fields["text"].context))
        except Problem:
            if self._named is not None:
                raise
            return None
        numbers = spread(len(self._opened.samples), COUNTED)
        captions = [caption for number in numbers for caption in self._opened.samples.captions(number)]
        lengths = finder.count(captions)
        return None if lengths is None else CaptionTokens(encoder=lengths.encoder, limit=lengths.limit,
                                                          counts=lengths.tokens, samples=len(numbers))

    def decoded(self, most: int, unusual: list[int], *, shown: bool) -> tuple[dict[int, Decoded], str]:
        """Latents of up to `most` samples, decoded, and a note about them."""
        from prep.cli.ticker import progress
        from prep.models.fingerprint import digest_file, digest_vae, vae_files
        from prep.models.loading import quiet_libraries
        from prep.report.snapshots.latents import decode_samples, to_decode

        quiet_libraries()
        from prep.models.vae import VaeDecoder

        place, numbers = self._place(), to_decode(len(self._opened.samples), most, unusual)
        other = digest_vae(vae_files(place), digest_file) != self._opened.manifest.document["models"]["vae"]
        vae = VaeDecoder(place, device=self._device)
        with progress("decoding latents", len(numbers), unit="samples", shown=shown) as tick:
            decoded = decode_samples(self._opened, numbers, vae.decode, tick)
        note = (f"Latents of {len(decoded):,} samples are decoded beside their pictures, the lowest PSNR first: the "
                "most unusual ones, and others evenly spread.")
        if other:
            say(f"warning: the VAE of {place} is not the one that made these latents")
            note += " The VAE that decoded them is not the one that made them."
        return decoded, note
