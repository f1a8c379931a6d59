"""The command `report`: what happened in a run, from the events it left; needs neither torch nor Lightning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_par.resilience import report_page
from lightning_par.resilience.events import FILE, read_events
from lightning_par.resilience.run_summary import summarise


def run(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0; 2 where the command line is wrong, there are no events, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        "lightning-par report",
        description="Say what happened in a run, over all its starts: loss, throughput, memory, skips, rewinds, "
        "checkpoints, stragglers, and where the time went.",
    )
    parser.add_argument("run_dir", type=Path, help=f"the default_root_dir of the Trainer, where {FILE} lies")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network, too")
    options = parser.parse_args(arguments)
    directory = options.run_dir
    if not (directory / FILE).is_file():
        print(
            f"lightning-par: there is no {FILE} in {directory}; ThroughputMonitor writes it to the Trainer's "
            "default_root_dir, from the start of training on",
            file=sys.stderr,
        )
        return 2
    found, name = summarise(read_events(directory)), directory.resolve().name
    print(report_page.text(found, name), end="")
    if options.html is not None:
        try:
            options.html.write_text(report_page.page(found, name), encoding="utf-8")
        except OSError as e:
            print(f"lightning-par: the page cannot be written: {e}", file=sys.stderr)
            return 2
        print(f"-> {options.html}")
    return 0
