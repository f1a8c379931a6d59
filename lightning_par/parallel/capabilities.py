"""What works together, what is refused and why: data, from which validation and the table in the docs are made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lightning_par.errors import Problem

Status = Literal["works", "planned", "refused"]


@dataclass(frozen=True)
class Capability:
    """The standing of one feature, or of two features together.

    Attributes:
        status: `works` (a parity test covers it), `planned` (no implementation yet), `refused` (cannot work).
        reason: Why it does not work; empty where it does.
        python: The change that leads to something that works.
        yaml: The same in YAML, where it is no plain `name: value`.
    """

    status: Status
    reason: str = ""
    python: str = ""
    yaml: str = ""


WORKS = Capability("works")

FEATURES: dict[str, Capability] = {
    "ddp": WORKS,
    "zero1": WORKS,
    "zero2": WORKS,
    "zero3": WORKS,
    "hsdp": WORKS,
    "tp": WORKS,
    "sequence parallel": WORKS,
    "cp": Capability("planned", "context parallelism has no implementation yet", "cp_size=1"),
    "pp": WORKS,
    "ep": Capability("planned", "expert parallelism has no implementation yet", "ep_size=1"),
    "accumulation": WORKS,
    "gradient clipping": WORKS,
    "32-true": WORKS,
    "64-true": WORKS,
    "bf16-true": WORKS,
    "bf16-mixed": WORKS,
    "16-mixed": WORKS,
    "activation checkpointing": WORKS,
    "compile": WORKS,
    "cpu offload": WORKS,
    "sharded checkpoint": WORKS,
    "full checkpoint": WORKS,
}

# Pairs that are not simply the weaker of their two features.
PAIRS: dict[frozenset[str], Capability] = {
    frozenset({"ddp", "cpu offload"}): Capability(
        "refused", "replicated parameters are not offloaded: offloading moves the shards of FSDP", "cpu_offload=False"
    ),
    frozenset({"sequence parallel", "compile"}): Capability(
        "refused",
        "the compiler cannot follow slices of the hidden state from block to block, which other code must not read",
        "compile=False",
    ),
    frozenset({"pp", "16-mixed"}): Capability(
        "refused",
        "a pipeline runs its backward before the fp16 scaler could scale the loss",
        "precision='bf16-mixed'",
        "precision: bf16-mixed",
    ),
    frozenset({"16-mixed", "cpu offload"}): Capability(
        "refused",
        "the fp16 gradient scaler checks gradients on the device, and offloaded ones are in host memory",
        "precision='bf16-mixed'",
        "precision: bf16-mixed",
    ),
}


def capability(first: str, second: str | None = None) -> Capability:
    """Look up one feature or a pair; a pair that the table does not name is as good as its weaker feature.

    Raises:
        KeyError: For a name that is no feature.
    """
    if second is None or first == second:
        return FEATURES[first]
    if second not in FEATURES:
        raise KeyError(second)
    pair = PAIRS.get(frozenset({first, second}))
    if pair is not None:
        return pair
    in_order = [standing for name, standing in FEATURES.items() if name in (first, second)]
    return next((standing for standing in in_order if standing.status != "works"), WORKS)


def problems_of(features: Collection[str]) -> list[Problem]:
    """List what keeps a set of features from working together, each with its fix."""
    found: dict[str, Problem] = {}
    for name in features:
        standing = FEATURES[name]
        if standing.status != "works":
            found.setdefault(standing.reason, Problem(standing.reason, standing.python, standing.yaml))
    for pair, standing in PAIRS.items():
        if standing.status != "works" and pair <= set(features):
            found.setdefault(standing.reason, Problem(standing.reason, standing.python, standing.yaml))
    return list(found.values())


def markdown_table() -> str:
    """Render the table of the docs: layouts in rows, options in columns, reasons below."""
    layouts = ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "sequence parallel", "cp", "pp", "ep"]
    options = [name for name in FEATURES if name not in layouts]
    notes: list[str] = []

    def cell(standing: Capability) -> str:
        if standing.status == "works":
            return "works"
        if standing.reason not in notes:
            notes.append(standing.reason)
        return f"{standing.status} [{notes.index(standing.reason) + 1}]"

    lines = ["| | " + " | ".join(options) + " |", "|---" * (len(options) + 1) + "|"]
    for layout in layouts:
        cells = (cell(capability(layout, option)) for option in options)
        lines.append(f"| `{layout}` | " + " | ".join(cells) + " |")
    pairs = [(a, b) for pair in PAIRS for a, b in [sorted(pair)] if a not in layouts and b not in layouts]
    for a, b in pairs:
        lines.append(f"\n`{a}` with `{b}`: {cell(capability(a, b))}.")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])
