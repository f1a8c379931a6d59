"""What stands against dividing a group of Linears, before anything is tried."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_par.errors import Problem
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup


class Limits(NamedTuple):
    """Problems of a group.

    Attributes:
        structure: They rule out any division.
        sizes: Numbers that `tp_size` does not divide, so that no rank can compute with its own slice.
        reductions: What mixes features, so that no rank can compute with its own slice.
        outputs: Numbers that `tp_size` does not divide, so that nothing can be gathered.
    """

    structure: tuple[Problem, ...]
    sizes: tuple[Problem, ...]
    reductions: tuple[Problem, ...]
    outputs: tuple[Problem, ...]

    @property
    def compute(self) -> tuple[Problem, ...]:
        """What rules out that each rank computes with its own slice; "gather" may be left."""
        return self.sizes + self.reductions


def limits_of(group: LinearGroup, graph: LinearGraph, block: nn.Module, tp_size: int) -> Limits:
    """List what rules out dividing a group over `tp_size` ranks."""
    outputs = tuple(_outputs(group, graph, tp_size))
    return Limits(
        structure=(*_structure(group, graph), *_parameters(group, graph, block)),
        sizes=tuple(_sizes_of_slices(group, graph, tp_size, "replicate" if outputs else "gather")),
        reductions=tuple(
            Problem(f"{text}, which no rank has all of", _instead(group.columns[0])) for text in group.reductions
        ),
        outputs=outputs,
    )


def uncalled_reason(name: str, block: nn.Module) -> str:
    """Why a Linear that never ran as a module stays replicated."""
    parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)] + [""]
    owner = next((p for p in parents if isinstance(block.get_submodule(p), nn.MultiheadAttention)), None)
    if owner is None:
        return "its forward was not called in the example"
    return "nn.MultiheadAttention computes with its weights without calling it"


def _structure(group: LinearGroup, graph: LinearGraph) -> Iterator[Problem]:
    for name in group.names:
        if graph.linears[name].role == "conflict":
            yield Problem(f"{name} is called twice, once on whole and once on divided features")
    if group.leaks:
        yield Problem(f"the output of {group.columns[0]} reaches the block's output with no Linear after it")
    elif not group.rows:
        yield Problem(f"no Linear takes the output of {group.columns[0]}")


def _parameters(group: LinearGroup, graph: LinearGraph, block: nn.Module) -> Iterator[Problem]:
    uses = Counter(param for _, param in block.named_parameters(remove_duplicate=False))
    for name in group.names:
        linear = block.get_submodule(name)
        weight, node = linear._parameters.get("weight"), graph.linears[name]
        if is_parametrized(linear) or not isinstance(weight, Tensor):
            yield Problem(
                f"the weight of {name} is computed from other parameters (parametrization, weight norm)",
                "remove the parametrization",
            )
        elif not weight.is_floating_point() or weight.numel() != node.in_features * node.out_features:
            yield Problem(f"{name} is quantised: its weight is {weight.dtype} of shape {tuple(weight.shape)}")
        elif isinstance(weight, DTensor):
            yield Problem(f"{name} is sharded already", "divide the block over tp first, then shard it over data ranks")
        elif extra := set(linear._parameters) - {"weight", "bias"}:
            yield Problem(f"{name} holds other parameters beside its weight and bias: {', '.join(sorted(extra))}")
        if any(uses[param] > 1 for param in linear.parameters(recurse=False)):
            yield Problem(f"{name} shares a parameter with another module")


def _outputs(group: LinearGroup, graph: LinearGraph, tp_size: int) -> Iterator[Problem]:
    for name in group.names:
        node = graph.linears[name]
        # A row is divided by its input; to gather, each is divided by its output.
        if node.out_features % tp_size:
            size = node.out_features
            yield Problem(f"{name} has {size} output features, which tp_size={tp_size} does not divide", _sizes(size))


def _sizes_of_slices(group: LinearGroup, graph: LinearGraph, tp_size: int, instead: str) -> Iterator[Problem]:
    nodes = [graph.linears[name] for name in group.names]
    heads = [(node.name, view) for node in nodes for view in node.heads if node.role == "column"]
    common = math.gcd(*(view.heads for _, view in heads)) if heads else 0
    for name, view in heads:
        if view.heads % tp_size:
            yield Problem(
                f"{name} makes {view.heads} {'head' if view.heads == 1 else 'heads'} of {view.size} features, which "
                f"tp_size={tp_size} does not divide",
                f"{_sizes(common)}, or {_instead(name, instead)}",
            )
    columns = [(node.name, part) for node in nodes if node.role == "column" for part in node.parts]
    rows = [(node.name, node.in_features) for node in nodes if node.role == "row"]
    # A row takes what the columns make, so their misfits are one.
    for name, part in columns if any(part % tp_size for _, part in columns) else rows:
        if part % tp_size:
            what = f"{name} has {part} inner features, which tp_size={tp_size} does not divide"
            yield Problem(what, f"{_sizes(part)}, or {_instead(name, instead)}")


def _instead(name: str, style: str = "gather") -> str:
    return f'tp_plan={{"*{name}": "{style}"}}'


def _sizes(width: int) -> str:
    sizes = [str(size) for size in range(1, min(width, 64) + 1) if width % size == 0]
    return f"a tp_size of {', '.join(sizes[:-1]) + ' or ' if sizes[:-1] else ''}{sizes[-1]}"


def is_stacked(module: nn.Module) -> bool:
    """Whether a module holds stacks of matrices itself, as the experts of Hugging Face models do."""
    return any(param.dim() > 2 and torch.is_floating_point(param) for param in module.parameters(recurse=False))
