"""Has each rank write its rows of a divided model's tensors, through torch.distributed.checkpoint (imported only here).

It plans what a rank writes from FSDP's own record of who has which rows. Its writers of files are not used:
`FileSystemWriter` pickles an index, and `HuggingFaceStorageWriter` copies all of a rank's tensors once more, orders the
metadata differently from run to run, and writes past `prep.fs.atomic`. The files are those of the latter, and its
reader, `HuggingFaceStorageReader`, can read them. Here `train.runs.safetensors.reader` does: that one takes any file
that lies in the directory, checks no digest, and leaves rows that no file has as they were in memory.

Each rank plans alone (`no_dist`), since it is settled who has what: plans of several ranks would travel as pickles.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor
from torch.futures import Future

Write = Callable[[Mapping[str, Tensor], Mapping[str, str]], None]


def save_rows(rows: Mapping[str, Tensor], divided: Mapping[str, Any], write: Write) -> None:
    """Calls `write` with the rows that this rank has, and with metadata that say where they belong.

    `divided`: for each tensor, one of FSDP's that is divided in the same way. Raises what `write` raises.
    """
    state = {name: DTensor.from_local(value.detach(), divided[name].device_mesh, divided[name].placements,
                                      run_check=False, shape=divided[name].shape, stride=divided[name].stride())
             for name, value in rows.items() if len(value)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it assumes a single process
            save(state, storage_writer=_Writer(write), planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # a BaseException, around what was raised
        raise next(iter(error.failures.values()))[0] from None


class _Planner(DefaultSavePlanner):
    """A plan of this rank's rows alone. The usual planner refuses, in some versions, what does not make up a whole."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)


class _Writer(StorageWriter):
    """Hands what is to be written to a function."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        tensors: dict[str, Any] = {}
        places = {}
        for item in plan.items:
            assert item.tensor_data is not None, "all are tensors"
            tensors[item.index.fqn] = planner.resolve_data(item)
            places[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        self._write(tensors, {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"})
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is prepared: the directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """The files say themselves what they hold."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
