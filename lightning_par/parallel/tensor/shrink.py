"""Plan with a narrow copy of a wide block, whose structure is proven to be that of the block.

A plan depends on how Linears hang together and on what divides their sizes, not on the sizes themselves. So all widths
are divided by one number: with them the size of each head, or, where the block's code does not allow that, the count
of heads. The copy is used only if the block and the copy run the same operators, on sizes that differ by that number
alone, and if what the trace finds of the one is what it finds of the other. The block itself is traced with shapes
alone, where its code allows it: no large parameter is read or copied.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_par.parallel._compat import leaves, map_tensors
from lightning_par.parallel.tensor._compat import DispatchMode, fake_tensors
from lightning_par.parallel.tensor.apply import set_attribute
from lightning_par.parallel.tensor.attributes import watching
from lightning_par.parallel.tensor.trace import HeadView, LinearGraph, LinearGroup, LinearNode, trace_linears
from lightning_par.parallel.tensor.verify import Trial, describe, prepare, with_values

log = logging.getLogger(__name__)

# A width is never made smaller: few features hide what several do.
_LEAST = 8
# The first copy is nearly always the right one.
_MOST_FACTORS, _MOST_COPIES = 4, 16


class Shrunk(NamedTuple):
    """A narrow copy of a block.

    Attributes:
        trial: The copy, prepared for verification.
        graph: The trace of the copy.
        original: The trace of the block.
    """

    trial: Trial
    graph: LinearGraph
    original: LinearGraph


@dataclass(frozen=True)
class _Scale:
    """Which numbers are divided, and by what.

    Attributes:
        numbers: Widths, and sizes or counts of heads.
        factor: What they are divided by.
        fewer_heads: Whether counts of heads are divided, and not their sizes.
    """

    numbers: frozenset[int]
    factor: int
    fewer_heads: bool

    def of(self, number: int) -> int:
        return number // self.factor if number in self.numbers else number

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(map(self.of, tensor.shape))

    def tensor(self, tensor: Tensor) -> Tensor:
        """The first rows and columns, with memory of their own."""
        part = tensor.detach()[tuple(slice(size) for size in self.shape(tensor))].clone()
        part.requires_grad_(tensor.requires_grad)
        return with_values(nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)

    def node(self, node: LinearNode) -> LinearNode:
        heads = tuple(
            HeadView(
                view.start // self.factor,
                view.heads // self.factor if self.fewer_heads else view.heads,
                view.size if self.fewer_heads else view.size // self.factor,
            )
            for view in node.heads
        )
        inner, outer, parts = self.of(node.in_features), self.of(node.out_features), tuple(map(self.of, node.parts))
        return replace(node, in_features=inner, out_features=outer, parts=parts, heads=heads)

    def group(self, group: LinearGroup) -> LinearGroup:
        def smaller(found: re.Match[str]) -> str:
            return f"over {self.of(int(found[1]))} features"

        return replace(group, reductions=tuple(re.sub(r"over (\d+) features", smaller, t) for t in group.reductions))

    def graph(self, graph: LinearGraph) -> LinearGraph:
        """What the trace of the copy must be."""
        linears = {name: self.node(node) for name, node in graph.linears.items()}
        return LinearGraph(linears, tuple(map(self.group, graph.groups)), graph.uncalled)


class _Operation(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]


class _Record(DispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves(out) if isinstance(leaf, Tensor))
        if shapes:  # and no question, such as for a device
            self.operations.append(_Operation(str(func), shapes))
        return out


class _Run(NamedTuple):
    """What one forward showed.

    Attributes:
        graph: The trace.
        operations: What was computed.
        read: Integers that were read from modules and their settings.
        fake: Whether with shapes alone.
    """

    graph: LinearGraph
    operations: list[_Operation]
    read: Mapping[tuple[str, str], int]
    fake: bool


def shrink(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tp_size: int,
    device: torch.device | str = "cpu",
) -> Shrunk | None:
    """Make a narrow copy of a block that a plan for `tp_size` ranks can be found with; the block stays as it is.

    Args:
        block: The block.
        args: Positional arguments of one call.
        kwargs: Keyword arguments of that call.
        tp_size: Number of ranks. The numbers that it divides stay divisible by it, and no others become so.
        device: Where to verify.

    Returns:
        None if no narrow copy has the structure of the block.
    """
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (*block.parameters(), *block.buffers())):
        return None
    try:
        run = _traced(block, args, kwargs)
    except Exception as error:  # the block's own code
        log.info("%s is planned at its full width: %s", type(block).__name__, describe(error))
        return None
    ways = ((scale, kept) for scale in _scales(block, run, tp_size) for kept in _readings(run, scale))
    for scale, kept in islice(ways, _MOST_COPIES):
        why = "its structure changes with its width"
        try:
            small_args, small_kwargs = map_tensors(scale.tensor, (args, dict(kwargs)))
            shrunk = _accepted(_narrow(block, run, scale, kept), small_args, small_kwargs, run, scale, device)
        except Exception as error:  # the block's own code, with sizes it may not know
            shrunk, why = None, describe(error)
        if shrunk is not None:
            return shrunk
        log.info("no copy of %s 1/%d as wide: %s", type(block).__name__, scale.factor, why)
    return None


def fingerprint(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What a block computes in one call, in evaluation and in training, in a few letters.

    Blocks that are alike may do different things: by an index of the layer, by a function that they hold.
    """
    runs = [_traced(block, args, kwargs, training=training) for training in (False, True)]
    said = repr([(run.graph, [operation.name for operation in run.operations]) for run in runs])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _accepted(
    small: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    run: _Run,
    scale: _Scale,
    device: torch.device | str,
) -> Shrunk | None:
    """Prepare a narrow copy, if it computes what the block does."""
    if not _is_like(run, _traced(small, args, kwargs, [fake_tensors if run.fake else nullcontext]), scale):
        return None
    trial = prepare(small, args, kwargs, device, f" on a copy 1/{scale.factor} as wide")
    graph = trace_linears(trial.block, trial.args, trial.kwargs)
    return Shrunk(trial, graph, run.graph) if graph == scale.graph(run.graph) else None


def _copied(block: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a block, with other tensors in place of its own."""
    tensors = [*block.parameters(), *block.buffers()]
    return copy.deepcopy(block, {id(tensor): change(tensor) for tensor in tensors})


def _traced(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modes: Sequence[Callable[[], AbstractContextManager[Any]]] = (fake_tensors, nullcontext),
    *,
    training: bool = False,
) -> _Run:
    """Trace a block in the first mode that its code allows."""
    names = [name for name, _ in block.named_modules()]
    for mode in modes:
        record = _Record()
        try:
            with mode():
                # What code keeps of a run, such as a table, stays in a copy that shares the parameters.
                twin = _copied(block, _stand_in).train(training)
                with record, watching(twin, names) as read:
                    graph = trace_linears(twin, args, kwargs)
            return _Run(graph, record.operations, read, mode is fake_tensors)
        except Exception:  # a decision that depends on values
            if mode is modes[-1]:
                raise
    raise ValueError("no mode")


def _stand_in(tensor: Tensor) -> Tensor:
    """The parameter itself, or a copy of a buffer; zeros for what is on the meta device."""
    if not tensor.is_meta:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
    # NumPy's zeros take no memory until they are written, unlike those of torch.
    memory = torch.from_numpy(np.zeros(tensor.numel() * tensor.element_size(), np.uint8))
    zeros = memory.view(tensor.dtype).view(tensor.shape)
    return nn.Parameter(zeros, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros


def _scales(block: nn.Module, run: _Run, tp_size: int) -> Iterator[_Scale]:
    """Ways to make a block narrow: smaller heads first, then fewer; those with the fewest parameters first."""
    views = [view for node in run.graph.linears.values() for view in node.heads]
    sizes, counts = {view.size for view in views}, {view.heads for view in views}
    features = _features(block, run.graph)
    # Sizes of inputs may coincide: no plan divides samples or positions.
    present = {size for param in block.parameters() for size in param.shape} | set(run.read.values()) | sizes | counts
    for fewer_heads, inner in ((False, sizes), (True, counts)):
        scales = []
        for factor in range(2, max(features, default=0) // _LEAST + 1):
            wide = {n for n in features if n % factor == 0 and n // factor >= _LEAST}
            least = 2 if fewer_heads else _LEAST
            scale = _Scale(frozenset(wide | inner), factor, fewer_heads)
            if (
                wide
                and all(n % factor == 0 and n // factor >= least for n in inner)
                and all(math.gcd(n // factor, tp_size) == math.gcd(n, tp_size) for n in wide | (inner & counts))
                # Numbers that become equal would hide that one is used for the other.
                and not {scale.of(n) for n in scale.numbers} & (present - scale.numbers)
            ):
                scales.append(scale)
        if fewer_heads and not counts:
            return
        yield from sorted(scales, key=lambda scale: _numel(block, scale))[:_MOST_FACTORS]


def _features(block: nn.Module, graph: LinearGraph) -> set[int]:
    """Widths of what the Linears of a block take and make, and of matrices that are no Linears."""
    # What a router makes is as wide as there are experts.
    ends = {name for group in graph.groups if not group.rows for name in group.columns}
    nodes = graph.linears.values()
    found = {node.in_features for node in nodes}
    found |= {size for node in nodes if node.name not in ends for size in (*node.parts, node.out_features)}
    matrices = [param.shape[-2:] for param in block.parameters() if param.dim() > 1]
    wide = min((node.in_features for node in nodes), default=0)
    return found | {size for shape in matrices for size in shape if size >= wide}


def _numel(block: nn.Module, scale: _Scale) -> int:
    return sum(math.prod(scale.shape(param)) for param in block.parameters())


def _readings(run: _Run, scale: _Scale) -> Iterator[frozenset[str]]:
    """Attributes to leave as they are: a number may be a count of heads in one and something else in another."""
    counts = {view.heads for node in run.graph.linears.values() for view in node.heads}
    doubtful = sorted({attribute for (_, attribute), n in run.read.items() if n in scale.numbers & counts})
    for count in range(len(doubtful) + 1):
        yield from map(frozenset, combinations(doubtful, count))


def _narrow(block: nn.Module, run: _Run, scale: _Scale, kept: frozenset[str]) -> nn.Module:
    """A narrow copy, with the numbers that its modules hold."""
    small = _copied(block, scale.tensor)
    for module in small.modules():
        for attribute, value in vars(module).items():
            if attribute in kept:
                continue
            if type(value) is int:
                vars(module)[attribute] = scale.of(value)
            elif isinstance(value, tuple) and all(type(number) is int for number in value):
                vars(module)[attribute] = tuple(map(scale.of, value))
    for (name, attribute), value in run.read.items():
        if "." in attribute and attribute not in kept:
            set_attribute(small.get_submodule(name), attribute, scale.of(value))
    return small


def _is_like(original: _Run, small: _Run, scale: _Scale) -> bool:
    """Whether the copy computes what the block computes, on narrower tensors."""
    if scale.graph(original.graph) != small.graph:
        return False
    if not original.fake:
        # Which experts run, and how often, depends on values.
        return {op.name for op in original.operations} == {op.name for op in small.operations}
    if len(original.operations) != len(small.operations):
        return False
    pairs = zip(original.operations, small.operations, strict=True)
    return all(_is_narrower(whole, part, scale.factor) for whole, part in pairs)


def _is_narrower(whole: _Operation, part: _Operation, factor: int) -> bool:
    if whole.name != part.name or [len(shape) for shape in whole.shapes] != [len(shape) for shape in part.shapes]:
        return False
    sizes = zip(chain(*whole.shapes), chain(*part.shapes), strict=True)
    return all(large in (size, size * factor) for large, size in sizes)
