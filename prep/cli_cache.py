"""The `prep` commands that look at or after a cache; cli.py registers them. Late imports keep `--help` quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json, say
from prep.errors import EXIT_FINDINGS, CacheError


def inspect(
    manifest: opt.ManifestArg,
    sample: Annotated[str | None, typer.Option(help="show all about the sample of this name")] = None,
    html: Annotated[Path | None, typer.Option(help="write one self-contained page with plots and a gallery")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show what a manifest holds: fields, dtypes, shapes, buckets, sizes, models, rejects."""
    from prep.manifest import describe as audit
    from prep.manifest.document import read
    from prep.report.terminal import tables as terminal

    opened = audit.open_audit(read(manifest))
    if html is not None:
        from prep.images.decode import quiet as quiet_pillow
        from prep.report.pages.manifest import check_page, write_page

        quiet_pillow()
        check_page(opened, html)
        write_page(opened, html)
        say(f"wrote {html}")
    document = audit.inspect(opened) if sample is None else audit.look_up(opened, sample)
    if as_json:
        put_json(document)
    elif html is None or sample is not None:
        put(terminal.inspect_tables(document) if sample is None else terminal.sample_text(document))


def verify(
    manifest: opt.ManifestArg,
    quick: Annotated[bool, typer.Option("--quick", help="sizes, documents and indexes; no rows")] = False,
    jobs: Annotated[int, typer.Option(help="threads that read and digest", min=1)] = opt.JOBS,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Check every digest and checksum that a manifest depends on; exit 7 and name each damaged row."""
    from prep.maintenance.verify import verify as verify_all
    from prep.manifest.describe import open_audit
    from prep.manifest.document import read
    from prep.report.terminal.tables import verify_tables

    opened = open_audit(read(manifest))
    size = sum(field.bytes for field in opened.manifest.fields.values())
    with progress("verifying", size, unit="bytes", shown=not quiet) as tick:
        document = verify_all(opened, quick=quick, jobs=jobs, tick=tick)
    if as_json:
        put_json(document)
    else:
        put(verify_tables(document))
    if not document["ok"]:
        raise typer.Exit(CacheError.exit_code)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a manifest.json", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="another, or the same one later", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="exit 1 when they differ")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show what changed from manifest A to B, field by field: samples, rows, buckets, models, prompts, findings."""
    from prep.manifest.diff import compare
    from prep.manifest.document import read
    from prep.report.terminal.diff import changes_text

    document = compare(read(a), read(b))
    if as_json:
        put_json(document)
    else:
        put(changes_text(document))
    if exit_code and not document["same"]:
        raise typer.Exit(EXIT_FINDINGS if document["same"] is False else CacheError.exit_code)


def gc(
    cache: opt.CacheArg,
    more: Annotated[list[Path] | None, typer.Argument(metavar="MANIFEST", show_default=False, help="further manifests "
                                                      "to keep, so that --keep *.json names them all")] = None,
    keep: Annotated[list[Path] | None, typer.Option("--keep", help="a manifest whose rows stay; may be repeated",
                                                    show_default=False)] = None,
    older_than: Annotated[str, typer.Option(help="what is younger stays: 0, 30m, 12h, 7d")] = "24h",
    yes: Annotated[bool, typer.Option("--yes", help="remove it; without, only say what would be removed")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Remove from CACHE what no kept manifest names. Shows what would be removed, unless --yes."""
    from prep.maintenance.gc import clean

    guard = opt.seconds_of(older_than, "--older-than")
    done = clean(cache, [*keep, *(more or ())] if keep else [], guard=guard, asked=older_than, dry_run=not yes,
                 progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())


def compact(
    cache: opt.CacheArg,
    shard_mib: Annotated[int, typer.Option(help="size of a shard in MiB, at most; below half of it is small", min=1,
                                           max=4096)] = 256,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be joined")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Join many small shards of CACHE into few; rows stay, manifests stay valid. Exit 7 for damaged rows."""
    from prep.maintenance.compact import compact as join_all

    done = join_all(cache, shard_bytes=shard_mib << 20, dry_run=dry_run,
                    progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
    if done.lost:
        raise typer.Exit(CacheError.exit_code)


COMMANDS: tuple[Callable[..., None], ...] = (inspect, verify, diff, gc, compact)  # in the order of `prep --help`
