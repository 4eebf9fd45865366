"""What commands and scripts choose of an encode, besides the recipe: none of it decides the value of a row."""

from __future__ import annotations

from dataclasses import dataclass

from prep.runtime import usable_cores
from prep.setting import setting

JOBS = max(2, usable_cores())  # threads, or processes, that decode
DEVICES = ("auto", "cpu", "cuda", "mps")
BATCH, TEXT_BATCH = 4, 16  # pictures, and captions, per forward pass
EMBED_BATCH = 32  # pictures of a vision model, most of which see 224x224 pixels
GIB, MIB = 1 << 30, 1 << 20
MOST_SECONDS = 1e6  # no timer takes an infinite time
GRACE = 25.0  # seconds: five less than SLURM (KillWait) and Kubernetes (terminationGracePeriodSeconds) wait by default
SHARD_BYTES = 256 * MIB
MOST_PARTS = 100_000  # of a plan; clusters allow arrays of a thousand to some ten thousand jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOptions:
    """The options of `prep encode` and the keywords of `prep.api.encode`, which are made of these fields."""

    device: str = setting("auto", choices=(*DEVICES, "all"), other="cuda:N,…", flag="--device",
                          help="where models run; several, or all GPUs, work side by side")
    batch_size: int | None = setting(None, low=1, example=4, flag="--batch-size",
                                     derived=f"{BATCH}, or fewer if the computer's memory holds no more on a CPU",
                                     help="pictures per forward pass of the VAE")
    jobs: int = setting(JOBS, low=1, flag="--jobs", help="threads that read and decode")
    encoder_memory: int | None = setting(
        None, high=10**6 * GIB, example=8 * GIB, flag="--encoder-memory", unit=float(GIB), derived="no limit",
        help="GiB of the device for the weights of a text encoder; a larger one stays in system RAM, and its layers "
        "are copied one by one")
    compiled: bool = setting(False, flag="--compile", help="compile VAE and text encoders with torch.compile: the "
                             "first batches take minutes, the others less; for many pictures")
    grace: float = setting(GRACE, high=MOST_SECONDS, flag="--grace", help="seconds to complete the task under way "
                           "after SIGTERM or SIGUSR1; no other is begun")
    shard_bytes: int = setting(SHARD_BYTES, low=1, high=4096 * MIB, flag="--shard-mib", unit=MIB,
                               help="maximum size of a shard in MiB; it has at most 256 rows")
    max_rejects: int | None = setting(
        None, low=0, example=10, flag="--max-rejects", derived="1 % of the samples, at least 10",
        help="stop after more than this many failed rows: latents that are not finite, files that changed meanwhile, "
        "decoders that crashed; bad pictures do not count")
    retry_rejects: bool = setting(False, flag="--retry-rejects", help="retry rows that earlier runs rejected")
    rehash: bool = setting(False, flag="--rehash", help="re-read every file, ignoring stamps")
    recheck: bool = setting(False, flag="--recheck", help="verify every byte that is reused, and make damaged rows "
                            "again")
    download: bool = setting(False, flag="--download", help="download a Hub model that is not in the Hub's cache")
    dry_run: bool = setting(False, flag="--dry-run", help="show which rows are missing, their size and the memory of "
                            "the encoders; write nothing")
    measure: bool = setting(False, flag="--measure", help="with --dry-run: encode a few rows to estimate "
                            "time and peak memory")
