"""Entry point: `python -m benchmarks run data`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark; its table goes to the terminal and into the file of `--out`."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    run = parser.add_subparsers(dest="command", required=True).add_parser("run", help="run one benchmark")
    run.add_argument(
        "benchmark",
        choices=["checkpoint", "data", "guard", "pipeline", "replay"],
        help="checkpoint: saves of the same state; data: the data-parallel family; guard: steps with NaNRewind, "
        "StallWatchdog and ThroughputMonitor, and snapshots; pipeline: the schedules against "
        "their simulation; replay: replayed pipelines against stages written by hand",
    )
    run.add_argument("--rounds", type=int, default=9, help="all but pipeline: how often each variant has its turn")
    run.add_argument("--steps", type=int, default=1, help="data, guard, replay: optimizer steps of one turn")
    run.add_argument("--minutes", type=float, default=5.0, help="all but pipeline: no round begins after so many")
    run.add_argument("--quick", action="store_true", help="something tiny, to see that it runs")
    run.add_argument("--out", type=Path, help="a file for the table, in Markdown")
    options = parser.parse_args(arguments)

    from benchmarks import checkpoint, data, guard, pipeline, replay

    if options.benchmark == "pipeline":
        text = pipeline.run(pipeline.QUICK if options.quick else pipeline.FULL)
    else:
        module: Any = {"checkpoint": checkpoint, "data": data, "guard": guard, "replay": replay}[options.benchmark]
        size, rounds = (module.QUICK, 2) if options.quick else (module.FULL, options.rounds)
        text = module.run(size, rounds, options.steps, options.minutes)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    # An exception, so that the ranks end with this process: they hold gigabytes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
