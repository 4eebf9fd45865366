"""Latentry as a library: what the commands do, as functions that print nothing, and their errors as exceptions.

    from prep import api

    api.encode("dataset.toml", "cache", "manifest.json", device="cuda")
    dataset = api.open_manifest("manifest.json")
    frame = dataset.table.to_pandas()
    for batch in api.batches("manifest.json", batch_size=8, steps=2000):
        ...

Every error that a user can mend is a `prep.errors.Problem`: its message says what was seen and expected, `hint` what
helps. `choices` are settings of the recipe by name, which count more than its file: {"image.resolution": [512, 768]}.
Paths may be strings, and a manifest may lie in an object store. `progress` is a `prep.progress.Progress`; the default
shows nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.encode.options import JOBS, EncodeOptions
from prep.errors import CacheError, UsageError
from prep.fs.place import place_of
from prep.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    from datasets import IterableDataset

    from prep.dataset.preview import EpochPreview
    from prep.encode.report import EncodeReport
    from prep.export.run import ExportReport
    from prep.loader.cached import CachedDataset
    from prep.loader.stream import BatchStream
    from prep.maintenance.compact import CompactReport
    from prep.maintenance.gc import GcReport
    from prep.manifest.document import Manifest
    from prep.masks.run import MaskReport
    from prep.recipe.schema import Recipe
    from prep.scan.scanner import ScanReport

PathLike = str | os.PathLike[str]
Choices = Mapping[str, Any]
USUAL = EncodeOptions()


def read_recipe(source: PathLike, choices: Choices | None = None) -> Recipe:
    """The recipe of a directory, of tars, or of a `dataset.toml`. Raises `ConfigError`, `UsageError`, `PathError`."""
    from prep.recipe.load import load_recipe
    from prep.recipe.options import overriding

    return load_recipe(place_of(source), choices=overriding(choices or {}))


def scan(source: PathLike, *, choices: Choices | None = None, model: str | None = None, select: Sequence[str] = (),
         ignore: Sequence[str] = (), rehash: bool = False, jobs: int = JOBS, progress: Progress = silent
         ) -> ScanReport:
    """Examines every picture, caption and mask, as `prep scan`: `findings`, sorted by path, and counts.

    Raises `UsageError` for an unknown code, `ConfigError`, `PathError`, `ModelError`.
    """
    from prep.scan.run import ScanCall, run_scan

    return run_scan(ScanCall(recipe=read_recipe(source, choices), jobs=jobs, model=model, select=select, ignore=ignore,
                             show=None, rehash=rehash, progress=progress))


def preview_buckets(source: PathLike, *, choices: Choices | None = None, batch_size: int = 4,
                    micro_batch: int | None = None, underfill: str = "partial", seed: int = 0, world: int = 1,
                    jobs: int = JOBS) -> EpochPreview:
    """Buckets, placements and steps, as `prep bucket`: `prep.dataset.preview.preview_as_json` has it as a document.

    Raises `ConfigError`, `PathError`.
    """
    from prep.dataset.bucketing import buckets_for
    from prep.dataset.facts import open_facts
    from prep.dataset.ingest import ingest
    from prep.dataset.preview import preview_epoch, train_samples
    from prep.dataset.samples import settle_masks

    recipe = read_recipe(source, choices)
    with closing(open_facts()) as facts:
        surveyed = ingest(recipe, facts, jobs=jobs)
    recipe = settle_masks(recipe, surveyed.items)
    bucketing = buckets_for(recipe, surveyed)
    return preview_epoch(bucketing, train_samples(recipe, surveyed.items, bucketing), batch_size=batch_size,
                         micro_batch=micro_batch, seed=seed, world=world,
                         underfill=underfill)  # type: ignore[arg-type]  # checked there


def make_masks(source: PathLike, output: PathLike, method: str, *, choices: Choices | None = None, model: str = "",
               device: str = "auto", batch_size: int = 4, jobs: int = JOBS, download: bool = False,
               progress: Progress = silent, **options: Any) -> MaskReport:
    """Makes masks in a directory of their own, as `prep mask`. `options` are those of `prep.masks.methods.MaskOptions`.

    Raises `UsageError`, `PathError`, `ModelError`.
    """
    from prep.masks.methods import MaskOptions
    from prep.masks.run import MaskCall, run_mask

    return run_mask(MaskCall(recipe=read_recipe(source, choices), output=Path(output), model=model, show=None,
                             choice=MaskOptions(method=method, **options),  # type: ignore[arg-type]  # checked there
                             device=device, batch_size=batch_size, jobs=jobs, download=download, progress=progress))


def encode(source: PathLike, cache: PathLike, output: PathLike = "manifest.json", *, choices: Choices | None = None,
           device: str = USUAL.device, batch_size: int | None = USUAL.batch_size, jobs: int = USUAL.jobs,
           encoder_memory: int | None = USUAL.encoder_memory, compiled: bool = USUAL.compiled,
           grace: float = USUAL.grace, shard_bytes: int = USUAL.shard_bytes,
           max_rejects: int | None = USUAL.max_rejects, retry_rejects: bool = USUAL.retry_rejects,
           rehash: bool = USUAL.rehash, recheck: bool = USUAL.recheck, download: bool = USUAL.download,
           dry_run: bool = USUAL.dry_run, measure: bool = USUAL.measure, progress: Progress = silent) -> EncodeReport:
    """Encodes what the cache lacks and writes the manifest, as `prep encode`. Interrupted, call it again.

    The keywords are the fields of `prep.encode.options.EncodeOptions`. Raises every kind of `Problem`.
    """
    from prep.encode.prepare import EncodeCall
    from prep.encode.run import run_encode

    options = EncodeOptions(
        device=device, batch_size=batch_size, jobs=jobs, encoder_memory=encoder_memory, compiled=compiled, grace=grace,
        shard_bytes=shard_bytes, max_rejects=max_rejects, retry_rejects=retry_rejects, rehash=rehash, recheck=recheck,
        download=download, dry_run=dry_run, measure=measure)
    return run_encode(EncodeCall(recipe=read_recipe(source, choices), cache=place_of(cache), output=place_of(output),
                                 options=options, progress=progress))


def _manifest(path: PathLike) -> Manifest:
    """The manifest at a path or URL. Raises `ManifestError`."""
    from prep.manifest.document import read_manifest

    return read_manifest(place_of(path))


def open_manifest(manifest: PathLike) -> CachedDataset:
    """The samples of a manifest as a table and as arrays; every place of a row is checked first.

    Raises `ManifestError`, `CacheError`.
    """
    from prep.loader.cached import CachedDataset
    from prep.loader.index import open_index

    return CachedDataset(open_index(_manifest(manifest)))


def picture(dataset: CachedDataset, number: int, view: int = 0, *, reference: int | None = None, alpha: str = "white"
            ) -> np.ndarray[Any, Any]:
    """A view of a sample's picture, uint8 [H, W, 3] of its bucket: scaled, cropped and mirrored as it was encoded.

    With `reference`, that of the view, counted from 0, in its own size. `alpha` is the recipe's color below transparent
    parts; "keep" gives [H, W, 4], the last channel opacity. The file, or object in a store, is decoded in this process.
    Raises `CacheError` if the picture is in a tar or a table, or another one by now; `BadPicture` if it cannot be
    decoded.
    """
    from prep.digest import digest_bytes
    from prep.images.decode import decode_picture, scale_and_crop

    samples, manifest = dataset.index.samples, dataset.index.manifest
    what, placement = "picture", dataset.placement(number, view)  # refuses another number
    digest = samples.picture_digest(number)
    read = partial(samples.picture_bytes, number, manifest.sources)
    if reference is not None:
        at, size = dataset.reference_number(number, reference, view), manifest.shapes[int(samples.bucket[number])][1]
        what, digest = f"reference {reference}", samples.reference_digest(number, at)
        placement = samples.reference_placement(at, size[reference])
        read = partial(samples.reference_bytes, number, at, manifest.sources)
    try:
        data = read()
    except OSError:
        data = b""  # it is not there
    if digest_bytes(data) != digest:
        raise CacheError(f"the {what} of '{dataset.name(number)}' is not in its source, or another one by now",
                         hint="encode again, if it was edited; a picture in a tar or a table is no file")
    return scale_and_crop(decode_picture(data, alpha=alpha), placement)


def hf_dataset(manifest: PathLike, role: str = "train", *, groups: int = 64) -> IterableDataset:
    """The samples of a role (train, validation, prior) as a `datasets.IterableDataset`, read from the cache as it is.

    An example is what `CachedDataset.examples` yields, one for each view of a sample. They come in the manifest's
    order, in so many `groups` that workers of a `DataLoader`, or ranks (`datasets.distributed`), divide among them.
    Raises `UsageError` without the extra `datasets`, or for another role; `ManifestError`, `CacheError`.
    """
    try:
        from datasets import IterableDataset as Streamed
    except ImportError:
        raise UsageError("hf_dataset needs the package datasets, which is not installed",
                         hint="pip install 'latentry[datasets]'") from None
    from prep.loader.cached import examples_of

    numbers = open_manifest(manifest).numbers(role)
    size = max(1, -(-len(numbers) // groups))
    parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return Streamed.from_generator(examples_of, gen_kwargs={"manifest": os.fspath(manifest), "numbers": parts})


def batches(manifest: PathLike, *, batch_size: int = 4, micro_batch: int | None = None, steps: int | None = None,
            underfill: str = "partial", shuffle: str = "global", seed: int = 0, caption_dropout: float = 0.0,
            reference_dropout: float = 0.0, each_reference_dropout: float = 0.0, timesteps: int = 1000,
            masked: bool = False, rank: int | None = None, world: int | None = None) -> BatchStream:
    """The batches of training, `steps` steps or without end: an iterable, and a `torch.utils.data.IterableDataset`.

    A batch of samples with reference pictures has them as `references`; `reference_dropout` is the chance that a
    showing goes without all of its own, `each_reference_dropout` that of each by itself.

    With `shuffle` "partitioned", each rank reads its own part of the samples, the same one in every epoch.
    `rank` and `world` default to those of `torch.distributed`, if that is initialized. `state_dict` and
    `load_state_dict` continue it exactly. Raises `ManifestError`, `CacheError`, `ConfigError`, `EmptyPlanError`.
    """
    from prep.loader.index import open_index
    from prep.loader.stream import BatchStream, StreamSettings

    settings = StreamSettings(batch_size=batch_size, micro_batch=micro_batch, seed=seed, timesteps=timesteps,
                              underfill=underfill,  # type: ignore[arg-type]  # both are checked by the plan
                              shuffle=shuffle,  # type: ignore[arg-type]
                              caption_dropout=caption_dropout, reference_dropout=reference_dropout,
                              each_reference_dropout=each_reference_dropout, masked=masked)
    return BatchStream(open_index(_manifest(manifest)), settings, steps=steps, rank=rank, world=world,
                       sharing=_ranks_here())


def _ranks_here() -> int:
    """How many processes torchrun started on this computer, if it did."""
    local_world = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(local_world)) if local_world.isdecimal() else 1


def verify(manifest: PathLike, *, quick: bool = False, jobs: int = JOBS) -> dict[str, Any]:
    """The document of `prep verify --json`: `ok`, and each damaged row. Raises `ManifestError`, `CacheError`."""
    from prep.maintenance.verify import verify as verify_all
    from prep.manifest.opened import open_manifest as opened

    return verify_all(opened(_manifest(manifest)), quick=quick, jobs=jobs)


def diff(first: PathLike, second: PathLike) -> dict[str, Any]:
    """The document of `prep diff --json`: what changed between two manifests. Raises `ManifestError`."""
    from prep.manifest.diff import compare

    return compare(_manifest(first), _manifest(second))


def gc(cache: PathLike, keep: Sequence[PathLike], *, older_than: float = 86400.0, dry_run: bool = True,
       abandon: Sequence[str] = (), notice: Callable[[str], None] = lambda _: None, progress: Progress = silent
       ) -> GcReport:
    """Removes from a cache what no manifest in `keep` uses and is older than so many seconds; by default, only reports.

    `abandon` names plans of encodes that nobody will finish, by the first digits of their names. Raises
    `UsageError`, `ManifestError`, `PathError`, `CacheError`.
    """
    from prep.maintenance.gc import collect_garbage

    return collect_garbage(place_of(cache), [place_of(each) for each in keep], guard=older_than,
                           older_than=f"{older_than:g}s", dry_run=dry_run, abandon=abandon, notice=notice,
                           progress=progress)


def compact(cache: PathLike, *, shard_bytes: int = 256 << 20, dry_run: bool = False, progress: Progress = silent
            ) -> CompactReport:
    """Joins small shards of a cache, as `prep compact`; manifests stay valid. Raises `PathError`, `CacheError`."""
    from prep.maintenance.compact import compact as join_all

    return join_all(place_of(cache), shard_bytes=shard_bytes, dry_run=dry_run, progress=progress)


def export(manifest: PathLike, to: str, output: PathLike, *, tar_bytes: int = 1 << 30, progress: Progress = silent
           ) -> ExportReport:
    """Writes a manifest's samples for other programs, as `prep export`; `to` is its `--to`.

    Raises `UsageError`, `PathError`, `ManifestError`, `CacheError`.
    """
    from prep.export.run import export as write_all

    return write_all(place_of(manifest), to, Path(output), tar_bytes=tar_bytes, progress=progress)
