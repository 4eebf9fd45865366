"""What very many pictures would take to encode, and to train on, before there are any: rows, shards, bytes, requests.

    python tests/benchmarks/bench_plan.py [--pictures 1e9] [--gpus 512] [--pictures-per-second 40] [--family sdxl]
        [--store-latency 0.03] [--world-size 1024] [--nodes 128] [--node-cache 2TB] [--masks] [--quick] [--write]

Nothing is read but this program. A data set is assumed and said first (`assumed.py`); its samples, rows, shards and
steps are made by the code that encodes and trains, for a sample of it, whose planning is measured. The rest is computed
(`simulate.py`, `train/cluster_forecast.py`). For real pictures `prep encode --dry-run --measure` says what they take,
for a real manifest `train check --world-size N --samples N`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from assumed import PUBLISHED, assumed, sealed  # noqa: E402  # after that
from results import emit, parser_of  # noqa: E402
from simulate import Scale, simulate_assumed  # noqa: E402

SAMPLES = 40 * 256  # a shard of each aspect ratio


def outlook(family: str, samples: int, config: Any, choices: dict[str, Any], *, world: int, nodes: int,
            room: int | None = None, planned: int = SAMPLES) -> Any:
    """What each node of a run on so many assumed samples takes, from the plan of `planned` of them."""
    from train.check.data import planned_by
    from train.cluster_forecast import outlook_of

    made = sealed(assumed(family, min(samples, planned), choices))
    found = outlook_of(made.index, planned_by(config, made.index.counts), world=world, nodes=nodes, room=room,
                       masked="mask" in choices, samples=samples)
    return replace(found, tables=round(made.tables * samples / len(made.index.samples)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=float, default=None, help="default: 1e9; 1e6 with --quick")
    parser.add_argument("--gpus", type=int, default=512, help="devices that encode")
    parser.add_argument("--pictures-per-second", type=float, default=None, help="that a device encodes")
    parser.add_argument("--family", choices=sorted(PUBLISHED), default="sdxl")
    parser.add_argument("--store-latency", type=float, default=0.03, help="seconds in which a store answers a request")
    parser.add_argument("--world-size", type=int, default=1024, help="ranks that train, a sample of a step each")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--node-cache", default="2TB", help="space for copies of shards on a node")
    parser.add_argument("--masks", action="store_true", help="a mask for each picture")
    options = parser.parse_args()
    from prep.parse import bytes_of
    from train.cli.summary import outlook_lines
    from train.config.load import load_config

    pictures = int(options.pictures or (1e6 if options.quick else 1e9))
    choices: dict[str, Any] = {"mask": "sidecar"} if options.masks else {}
    told = simulate_assumed(options.family, Scale(pictures=pictures, gpus=options.gpus, latency=options.store_latency,
                                                  rate=options.pictures_per_second), choices)
    config = load_config(None, {"batch_size": options.world_size, "steps": 1})
    run = outlook(options.family, pictures, config, choices, world=options.world_size, nodes=options.nodes,
                  room=bytes_of(options.node_cache))
    lines = [*told.as_lines(), *outlook_lines(run, options.store_latency)]
    emit("Very many pictures", "\n".join(f"- {line}" for line in lines), options.write)


if __name__ == "__main__":
    main()
