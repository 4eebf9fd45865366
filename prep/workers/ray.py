"""Reaches Ray clusters: the room of Ray, for all commands that run on one. Importing this imports no Ray."""

from __future__ import annotations

import math
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from prep.errors import Problem, UsageError, first_line
from prep.runtime import safe_path
from prep.workers.crew import Failure

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Which Ray cluster is used, and how much of it."""

    address: str = ""  # of a running cluster, or "auto"; "": one is started on this machine
    workers: int | None = None  # None: as many as the cluster has GPUs for, or one on each node


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How many workers a cluster gets, and what each of them has."""

    workers: int
    cpus: int
    gpus: float
    on_node: int  # workers of one node, at most

    @classmethod
    def of(cls, ray: Any, workers: int | None, gpus: float | None) -> Share:
        """The share of each of `workers` (`None`: one for `gpus` GPUs, or one on each node). `gpus` `None`: one GPU if
        the cluster has any.

        Raises `UsageError` for a cluster that has too little for one worker.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        total = sum(node.get("GPU", 0) for node in nodes)
        gpus = float(bool(total)) if gpus is None else gpus
        if not nodes or gpus > max(node.get("GPU", 0) for node in nodes):
            raise UsageError(f"no node of the Ray cluster has {gpus:g} GPUs and a CPU, which a worker needs",
                             hint="change --num-gpus-per-worker; ray status shows what the cluster has")
        capacity = sum(math.floor(node.get("GPU", 0) / gpus) for node in nodes) if gpus else len(nodes)
        workers = workers or capacity
        on_node = math.ceil(workers / len(nodes))
        least = int(min(node["CPU"] for node in nodes))
        return cls(workers=workers, cpus=1 if gpus else max(1, least // on_node), gpus=gpus, on_node=on_node)


def library(address: str) -> Any:
    """Ray, which an extra installs, for the cluster at `address`, as in `ClusterOptions`. Raises `UsageError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else Ray prints on stdout what raylets report
    if not address:  # read when Ray is imported: ask for a token, and listen on the loopback, as on Windows and macOS
        os.environ.update(RAY_AUTH_MODE="token", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    try:
        import ray  # here: an extra
        import ray.exceptions
    except ImportError:
        raise UsageError("--engine ray needs the package ray, which is not installed",
                         hint="pip install 'latentry[ray]', on all nodes") from None
    return ray


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A connection to the cluster at `address`, as in `ClusterOptions`. Raises `UsageError`."""
    if ray.is_initialized():  # by a caller, who keeps it
        yield
        return
    with nullcontext({"address": address}) if address else _own_cluster() as named:
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**named, job_config=_job(ray), log_to_driver=False, configure_logging=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray takes it, to exit at once
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # the last: without its token
            raise UsageError(f"no connection to the Ray cluster '{address or 'local'}': {first_line(error)}",
                             hint="start one with ray start --head, and ray start --address HOST:6379 on the other "
                             "nodes; if it was started with a token, copy ~/.ray/auth_token from its head to this "
                             "machine; without --address, prep starts one on this machine, in the directory "
                             "RAY_TMPDIR") from None
        try:
            if not address:
                _check_private(ray)
            yield
        finally:
            ray.shutdown()


@contextmanager
def _own_cluster() -> Iterator[dict[str, Any]]:
    """What `ray.init` needs to start a cluster that only this user can reach, in a directory that others cannot enter.

    Whoever reaches a cluster runs code as its owner. Ray would keep the token in a file that all can read.
    """
    place = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else None)  # short, as of all sockets
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place))  # of mode 0700
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token(), encoding="ascii")
    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    try:
        with safe_path():  # also of its workers
            # Ray opens the directory that it is given to everybody: hence one inside.
            yield {"address": "local", "include_dashboard": False, "_temp_dir": str(folder / "r")}
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _token() -> str:
    """The token of the clusters of this process, which Ray reads once."""
    return secrets.token_hex(32)


def _job(ray: Any) -> Any:
    """The configuration of a job whose workers find no modules in the command's current directory.

    Ray puts that directory before all others on the workers' path, unless it has copied a working directory to them.
    """
    job = ray.job_config.JobConfig()
    job._runtime_env_has_working_dir = lambda: True
    return job


def _check_private(ray: Any) -> None:
    """Raises `UsageError` if the cluster that was started listens beyond this machine."""
    addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
    if not all(ip_address(address).is_loopback for address in addresses):
        raise UsageError(f"the Ray cluster that was started listens on {', '.join(addresses)}, expected only "
                         "127.0.0.1: Ray was imported before prep could configure it",
                         hint="start it in a new process, or connect to a cluster with --address")


def actors_of(ray: Any, kind: type, share: Share, **options: Any) -> Any:
    """What makes actors of a class, each with its share. Ray repeats nothing, and answers `beat` beside other work."""
    return ray.remote(concurrency_groups={"beat": 1}, max_restarts=0, max_task_retries=0, num_cpus=share.cpus,
                      num_gpus=share.gpus, scheduling_strategy="SPREAD", **options)(kind)


def check_version(wanted: str) -> None:
    """In a worker: raises `UsageError` unless its node has the command's version of Latentry."""
    installed = version("latentry")
    if installed != wanted:
        raise UsageError(f"node {platform.node()} has Latentry {installed}, expected {wanted}, as the command",
                         hint="install the same version on all nodes: its keys and rows belong together")


def tried(work: Callable[[], T]) -> T | Failure:
    """In a worker: what `work` returns, or why it failed."""
    try:
        return work()
    except Problem as problem:
        return failed(problem)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Failure(problem=None, said=f"on node {platform.node()}: {said}")


def failed(problem: Problem) -> Failure:
    """In a worker: the failure that `problem` is, which names its node, because the command may run on another."""
    if f"node {platform.node()}" not in problem.message:
        problem.message = f"on node {platform.node()}: {problem.message}"
        problem.args = (problem.message,)
    return Failure(problem=problem, said=problem.message)
