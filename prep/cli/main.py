"""Registers the `prep` commands in the order of `prep --help`; each has a module beside this one."""

from __future__ import annotations

from typing import NoReturn

from prep.cli.app import make_app
from prep.cli.bucket import bucket
from prep.cli.caption import caption
from prep.cli.clean import clean
from prep.cli.codes import codes
from prep.cli.compact import compact
from prep.cli.console import run
from prep.cli.convert import convert
from prep.cli.demo import demo
from prep.cli.diff import diff
from prep.cli.doctor import doctor
from prep.cli.embed import embed
from prep.cli.encode import encode
from prep.cli.export import export
from prep.cli.gc import gc
from prep.cli.import_latents import import_latents
from prep.cli.init import init
from prep.cli.inspect_manifest import inspect
from prep.cli.jobs import jobs
from prep.cli.mask import mask
from prep.cli.models import models
from prep.cli.pack import pack
from prep.cli.prompts import prompts
from prep.cli.pull import pull
from prep.cli.push import push
from prep.cli.scan import scan
from prep.cli.seal import seal
from prep.cli.studio import studio
from prep.cli.unpack import unpack
from prep.cli.verify import verify
from prep.cli.view import view

app = make_app("Turns pictures, captions and masks into a verified cache and one manifest.json.",
               {"Start": (init, demo, doctor, models, convert),
                "Look at pictures": (scan, bucket, view),
                "Make a cache": (caption, mask, embed, encode, import_latents, seal, prompts),
                "Look at a cache, and keep it": (inspect, verify, diff, gc, compact, clean, codes),
                "Work on a project": (studio, jobs),
                "Share": (export, pack, unpack, push, pull)})


def main() -> NoReturn:
    """Entry point of the console script `prep`."""
    run(app, "prep")
