"""Train modules of published packages in one process and under layouts on two ranks, and print how far they differ.

    python -m examples.compat.run [--case NAME ...] [--layouts par_ddp par_fsdp]

Needs the packages of `requirements.txt`. Exits with 1 if a row is missing or a difference is more than rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from examples.compat.cases import CASES
from examples.compat.harness import BOUND, RANKS, Case, Record, compare, train
from lightning_par.testing import RanksFailed, run_ranks

LAYOUTS = ["par_ddp", "par_fsdp"]
TIMEOUT = 300.0


def columns(layouts: list[str]) -> list[str]:
    return ["package", "version", "module", "kind", "one process", *layouts]


def run_case(case: Case, layouts: list[str]) -> tuple[list[str], bool]:
    """Return the cells of the case's row, and whether each layout equals one process."""
    try:
        cells = [case.package, version(case.package), case.module, case.kind]
    except PackageNotFoundError:
        return [case.package, "not installed", case.module, case.kind, *["" for _ in ("one process", *layouts)]], False
    try:
        [reference] = run_ranks(1, train, case.name, None, timeout=TIMEOUT)
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return [*cells, cell(reason(error)), *["" for _ in layouts]], False
    first, last = reference.losses[0], reference.losses[-1]
    cells.append(f"{len(reference.gradients)} steps, loss {first:.4f} to {last:.4f}")
    results = [run_layout(case, layout, reference) for layout in layouts]
    return [*cells, *[text for text, _ in results]], all(same for _, same in results)


def run_layout(case: Case, layout: str, reference: Record) -> tuple[str, bool]:
    """Return the cell of a layout, and whether it equals one process."""
    try:
        records = run_ranks(RANKS, train, case.name, layout, timeout=TIMEOUT)
        difference = compare(records, reference)
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return cell(reason(error)), False
    except ValueError as error:
        return cell(f"**{error}**"), False
    units = records[0].units
    if (layout == "par_ddp") != (units == 0):
        return f"**{units} modules are sharded**", False
    sharded = f", {units} sharded" if units else ""
    if difference.largest <= BOUND:
        return f"{difference.largest:.0e}{sharded}", True
    parts = (f"{kind} {value:.0e}" for kind, value in vars(difference).items())
    return f"**{difference.largest:.0e}** ({', '.join(parts)}){sharded}", False


def reason(error: RanksFailed) -> str:
    """The exception that the first rank to fail raised, without its stack."""
    lines = str(error).splitlines()
    raised = [i for i, line in enumerate(lines) if line and not line[0].isspace() and ("Error" in line.split(":")[0])]
    if not raised:
        return lines[0]
    rest = lines[raised[0] :]
    end = next((i for i, line in enumerate(rest) if not line.strip()), len(rest))
    return textwrap.shorten(" ".join(rest[:end]), 300)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Print a table of the cases."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.compat.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME", help="which")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="names of strategies")
    options = parser.parse_args()
    # Of the ranks; whoever imports this module wants to see those of its own.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    print(f"| {' | '.join(columns(options.layouts))} |\n|{'---|' * len(columns(options.layouts))}", flush=True)
    alike = True
    for name in options.case:
        cells, same = run_case(CASES[name], options.layouts)
        alike = alike and same
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
