"""`train push`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import put, say
from prep.errors import UsageError
from prep.formatting import counted, format_bytes, printable
from prep.fs.place import require_local
from train.cli import options as opt


def push(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run with a result",
                                           show_default=False)],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="repository on the Hugging Face Hub: owner/name; made if "
                                        "it does not exist", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="make it public, or upload to a public one (default: "
                                         "private)")] = False,
    samples: Annotated[bool, typer.Option("--samples/--no-samples", help="upload the sample pictures, too")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files and where they would go; uses no "
                                          "network")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Upload a run's result, model card and sample pictures to the Hugging Face Hub, as one commit.

    The token is HF_TOKEN, or that of `hf auth login`. Nothing else of the run is uploaded.
    """
    from prep.cli.ticker import progress
    from prep.models.hub import address_of, repository, upload
    from train.report.push import files_of

    name = repository(repo)
    run = require_local(folder, "run", "copy it here, and name the copy", UsageError)
    pushed = files_of(run, samples=samples)
    if dry_run:
        for each, size in pushed.sizes.items():
            put(f"{format_bytes(size):>10}  {printable(each)} -> {address_of(name, each)}")
        say(f"would upload {counted(len(pushed.files), 'file')}, {format_bytes(sum(pushed.sizes.values()))}, to "
            f"{name}, {'public' if public else 'private'} if it is new")
        return
    with progress("uploading", None, unit="", shown=not quiet):
        private = upload(name, pushed.files, "Upload a trained result", public=public,
                         bars=not quiet and sys.stderr.isatty())
    if public and private:
        say(f"note: {name} was private before, and stays so; its settings on the Hub make it public")
    put(address_of(name))
