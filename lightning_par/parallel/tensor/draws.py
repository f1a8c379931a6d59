"""Where a block draws random numbers in training, and on which ranks these must differ.

On features that are divided each rank draws for its own; on what all ranks have, all must draw the same. Hooks can
switch the stream where a divided group begins and where it ends, so that is where the two kinds must lie.
"""

from __future__ import annotations

import copy

import torch

from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, RandomDraw, trace_linears
from lightning_par.parallel.tensor.verify import Trial


def trace_in_training(trial: Trial) -> LinearGraph:
    """Trace a copy of the trial's block in training mode, where it may draw random numbers."""
    device = next((param.device for param in trial.block.parameters()), torch.device("cpu"))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        return trace_linears(copy.deepcopy(trial.block).train(), trial.args, trial.kwargs)


def draws_in_group(group: LinearGroup, draws: tuple[RandomDraw, ...]) -> bool:
    """Whether random numbers are drawn between the columns and the rows of a group."""
    return any(_is_open(group, draw) for draw in draws)


def is_separable(group: LinearGroup, draws: tuple[RandomDraw, ...]) -> bool:
    """Whether all that is drawn between the columns and the rows of a group, and nothing else, is for its features."""
    return all(_is_open(group, draw) == bool(draw.linears.intersection(group.names)) for draw in draws)


def draws_on_whole(module: str, group: LinearGroup, draws: tuple[RandomDraw, ...]) -> bool:
    """Whether a module draws for whole tensors before a group in it ends."""
    return any(
        module in draw.modules and not draw.linears and not set(draw.called).intersection(group.rows) for draw in draws
    )


def _is_open(group: LinearGroup, draw: RandomDraw) -> bool:
    last = next((name for name in reversed(draw.called) if name in group.names), None)
    return last in group.columns
