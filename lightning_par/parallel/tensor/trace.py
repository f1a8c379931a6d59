"""Find out which Linear feeds which, by running a block once; no names are looked at.

A tensor is *open* for a Linear when that Linear's output features reach it with no other Linear in between. A Linear
whose input is open for none starts a region (a column: its output features can be divided over ranks); one whose input
is open closes it (a row: its input features can be). Columns and rows that share a region form a group, which is
divided as one or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_par.parallel._compat import leaves, map_leaves, no_torch_modes
from lightning_par.parallel.random import default_generator
from lightning_par.parallel.tensor._compat import DispatchMode, first_tensor, fresh

Role = Literal["column", "row", "conflict"]
# Operators that mix the features of their input, and where their arguments say over which dimensions.
_OVER_DIMS = {"_softmax", "_log_softmax", "mean", "sum", "var", "var_mean", "std", "amax", "linalg_vector_norm", "norm"}
_OVER_LAST = {"native_layer_norm", "_fused_rms_norm", "native_group_norm", "topk", "sort", "argmax"}
_CUTS = {"split", "split_with_sizes", "slice", "narrow", "unsafe_split", "unsafe_split_with_sizes"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"}


class HeadView(NamedTuple):
    """The features `start` to `start + heads * size` of a Linear's output, viewed as heads."""

    start: int
    heads: int
    size: int


@dataclass(frozen=True)
class LinearNode:
    """A Linear as the trace saw it.

    Attributes:
        name: Its name in the block.
        in_features: Size of its input.
        out_features: Size of its output.
        transposed: Whether its weight is (in, out), as in Hugging Face's `Conv1D`.
        role: "column", "row", or "conflict" where calls differ.
        parts: Sizes of the pieces its output is cut into, in order; one where it is not cut.
        heads: Views of its output, or of a piece of it, as heads.
    """

    name: str
    in_features: int
    out_features: int
    transposed: bool
    role: Role
    parts: tuple[int, ...]
    heads: tuple[HeadView, ...] = ()


@dataclass(frozen=True)
class LinearGroup:
    """Linears that are divided together.

    Attributes:
        columns: Those that open the region.
        rows: Those that close it; none where the region reaches the block's output.
        inner_parameters: Parameters of others that meet an open tensor, such as the weights of norms on heads.
        reductions: What mixes all features of a column's output, in words.
        leaks: Whether open tensors reach the block's output.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inner_parameters: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()
    leaks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.columns + self.rows


class RandomDraw(NamedTuple):
    """An operator that drew random numbers.

    Attributes:
        linears: Those that its arguments are open for.
        called: The Linears called so far, in order.
        modules: Names of the modules in whose forward it ran; "" is the block.
        shape: Of what it returned.
    """

    linears: frozenset[str]
    called: tuple[str, ...]
    modules: tuple[str, ...]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class LinearGraph:
    """What `trace_linears` found.

    Attributes:
        linears: Each Linear that was called, by name.
        groups: Linears that are divided together, in the order of their first call.
        uncalled: Linears that never ran as modules: their weights are used otherwise, or not at all.
        draws: Where random numbers were drawn.
    """

    linears: Mapping[str, LinearNode]
    groups: tuple[LinearGroup, ...]
    uncalled: tuple[str, ...] = ()
    draws: tuple[RandomDraw, ...] = ()


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear: `nn.Linear`, or what Hugging Face calls `Conv1D` (a weight (in, out), and `nf`)."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a Linear whose weight is (in, out)."""
    weight, features = module._parameters.get("weight"), getattr(module, "nf", None)
    if not isinstance(weight, Tensor) or not isinstance(features, int):
        return False
    return weight.dim() == 2 and weight.shape[1] == features


def common_module(names: Collection[str]) -> str:
    """The innermost module that holds all of some modules; "" is the block."""
    parents = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return ".".join(parts[0] for parts in common)


class _Piece(NamedTuple):
    """A tensor whose last dimension is `length` output features of one Linear, from `start` on."""

    linear: str
    start: int
    length: int


class _Flow(NamedTuple):
    """What is known about a tensor.

    Attributes:
        open: Linears it is open for.
        parameters: Parameters it is computed from, where no data takes part.
        data: Whether it depends on the block's inputs.
        piece: Which output features its last dimension is, if that is known.
    """

    open: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    data: bool = False
    piece: _Piece | None = None


@dataclass
class _Found:
    roles: dict[str, Role] = field(default_factory=dict)
    closed: list[tuple[frozenset[str], str]] = field(default_factory=list)
    cuts: dict[str, set[int]] = field(default_factory=dict)
    heads: dict[str, set[HeadView]] = field(default_factory=dict)
    inner: dict[str, set[str]] = field(default_factory=dict)
    reductions: dict[str, set[str]] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)
    draws: list[RandomDraw] = field(default_factory=list)

    def see_role(self, name: str, role: Role) -> None:
        self.roles[name] = role if self.roles.get(name, role) == role else "conflict"


class _Tracer(DispatchMode):
    """Follows each tensor from operator to operator."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.found = _Found()
        self.inside_linear = 0
        self.running: list[str] = []
        self._flows: dict[int, _Flow] = {}
        # Identity is the key, so nothing may be freed before the end.
        self._kept: list[Tensor] = []
        for name, param in block.named_parameters():
            self.set(param, _Flow(parameters=frozenset({name})))

    def set(self, tensor: Tensor, flow: _Flow) -> None:
        self._flows[id(tensor)] = flow
        self._kept.append(tensor)

    def get(self, tensor: Tensor) -> _Flow:
        return self._flows.get(id(tensor), _Flow())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random_before = _random_state(args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        out = func(*args, **(kwargs or {}))
        flows = [self.get(leaf) for leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        opened = frozenset[str]().union(*(flow.open for flow in flows))
        if random_before is not None and random_before != _random_state(args, kwargs):
            shape = next((tuple(leaf.shape) for leaf in leaves(out) if isinstance(leaf, Tensor)), ())
            self.found.draws.append(RandomDraw(opened, tuple(self.found.called), tuple(self.running), shape))
        data = any(flow.data for flow in flows)
        parameters = frozenset[str]().union(*(flow.parameters for flow in flows if not flow.data))
        if opened and not self.inside_linear:
            for name in opened:
                self.found.inner.setdefault(name, set()).update(parameters)
        pieces = {flow.piece for flow in flows if flow.open}
        piece = pieces.pop() if len(pieces) == 1 else None
        if piece is not None and not self.inside_linear:
            self._note(_operator(func), args, piece)
        flow = _Flow(opened, frozenset() if data else parameters, data)
        for leaf, its_piece in _with_pieces(_operator(func), args, out, piece):
            self.set(leaf, flow._replace(piece=its_piece))
            if its_piece is not None and piece is not None and its_piece.length != piece.length:
                self.found.cuts.setdefault(piece.linear, set()).update((its_piece.start, sum(its_piece[1:])))
            elif piece is not None and _operator(func) in _VIEWS:
                self._note_heads(args[0], leaf, piece)
        return out

    def _note(self, operator: str, args: Any, piece: _Piece) -> None:
        tensor = args[0]
        last = operator in _OVER_LAST
        if operator in _OVER_DIMS:
            dims = args[1] if len(args) > 1 and args[1] is not None else range(tensor.dim())
            dims = [dims] if isinstance(dims, int) else [dim for dim in dims if isinstance(dim, int)]
            last = any(dim % tensor.dim() == tensor.dim() - 1 for dim in dims)
        if last:
            text = f"{operator.removeprefix('native_').strip('_')} over {piece.length} features of {piece.linear}"
            self.found.reductions.setdefault(piece.linear, set()).add(text)

    def _note_heads(self, source: Tensor, viewed: Tensor, piece: _Piece) -> None:
        shape = viewed.shape
        if viewed.dim() < 2 or (shape[-1] == piece.length and viewed.dim() <= source.dim()):
            return
        if shape[-2] * shape[-1] == piece.length:
            self.found.heads.setdefault(piece.linear, set()).add(HeadView(piece.start, shape[-2], shape[-1]))
        elif viewed.dim() > 2 and shape[-3] * shape[-2] * shape[-1] == piece.length:
            # (parts, heads, head size) or (heads, parts, head size): verification tells which.
            size = shape[-2] * shape[-1]
            self.found.cuts.setdefault(piece.linear, set()).update(range(0, piece.length + 1, size))


def _random_state(args: Any, kwargs: Any) -> bytes:
    """The state of the generator that an operator may draw from: attention has operators that often do not."""
    tensors = (leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor))
    device = torch.device((kwargs or {}).get("device") or next((tensor.device for tensor in tensors), "cpu"))
    generator = default_generator(device)
    if generator is None:
        return b""
    with no_torch_modes():
        return generator.get_state().numpy().tobytes()


def _operator(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _with_pieces(operator: str, args: Any, out: Any, piece: _Piece | None) -> Iterator[tuple[Tensor, _Piece | None]]:
    """Each output tensor of an operator with the features its last dimension holds."""
    tensors = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
    if piece is None or operator not in _CUTS:
        for tensor in tensors:
            same = piece is not None and tensor.dim() > 0 and tensor.shape[-1] == piece.length
            yield tensor, piece if same else None
        return
    source = args[0]
    start = piece.start
    if operator in ("slice", "narrow"):
        begin = args[2] if len(args) > 2 and args[2] is not None else 0
        start += begin + source.shape[-1] if begin < 0 else begin
    for tensor in tensors:
        length = tensor.shape[-1]
        cut_elsewhere = source.dim() != tensor.dim() or source.shape[:-1] != tensor.shape[:-1]
        yield tensor, piece if cut_elsewhere else _Piece(piece.linear, start, length)
        start += length


def _hooks(tracer: _Tracer, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    opened: list[frozenset[str]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        opened.append(tracer.get(first_tensor((args, kwargs))).open)
        tracer.inside_linear += 1
        tracer.found.called.append(name)

    def after(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        tracer.inside_linear -= 1
        inputs = opened.pop()
        tracer.found.see_role(name, "row" if inputs else "column")
        if inputs:
            tracer.found.closed.append((inputs, name))
            tracer.set(out, _Flow(data=True))
        else:
            tracer.set(out, _Flow(frozenset({name}), data=True, piece=_Piece(name, 0, out.shape[-1])))

    return before, after


def trace_linears(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> LinearGraph:
    """Run a block once, without gradients, and report how its Linears hang together.

    Args:
        block: Any module; it is run as it is, so put it into the mode and on the device that matter.
        args: Positional arguments of its forward.
        kwargs: Keyword arguments of its forward.
    """
    linears = {name: module for name, module in block.named_modules() if is_linear(module)}
    tracer = _Tracer(block)
    handles: list[Any] = []

    def leave(*_: Any) -> None:
        tracer.running.pop()

    for name, module in block.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: tracer.running.append(name)))
        handles.append(module.register_forward_hook(leave))
    for name, module in linears.items():
        before, after = _hooks(tracer, name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            tracer.set(leaf, _Flow(data=True))
    try:
        with _without_fast_path(), torch.no_grad(), tracer:
            out = block(*map_leaves(fresh, args), **map_leaves(fresh, dict(kwargs or {})))
    finally:
        for handle in handles:
            handle.remove()
    leaked = frozenset[str]().union(*(tracer.get(leaf).open for leaf in leaves(out) if isinstance(leaf, Tensor)))
    found = tracer.found
    nodes = {name: _node(name, module, found) for name, module in linears.items() if name in found.roles}
    uncalled = tuple(name for name in linears if name not in found.roles)
    return LinearGraph(nodes, tuple(_groups(found, leaked)), uncalled, tuple(found.draws))


@contextmanager
def _without_fast_path() -> Iterator[None]:
    # Without gradients `nn.TransformerEncoderLayer` would run as one operator that is never used in training.
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _node(name: str, module: nn.Module, found: _Found) -> LinearNode:
    transposed = is_transposed(module)
    # Not from the weight where it can be helped: a quantised one has another shape.
    sizes: Any = module._parameters["weight"].shape if transposed else (module.in_features, module.out_features)  # type: ignore[union-attr]
    in_features, out_features = sizes
    points = sorted({0, out_features} | found.cuts.get(name, set()))
    parts = tuple(after - before for before, after in zip(points, points[1:], strict=False))
    heads = tuple(sorted(found.heads.get(name, set())))
    return LinearNode(name, in_features, out_features, transposed, found.roles[name], parts, heads)


def _groups(found: _Found, leaked: frozenset[str]) -> Iterator[LinearGroup]:
    parent = {name: name for name in found.roles}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for columns, row in found.closed:
        for column in columns:
            parent[root(column)] = root(row)
    members: dict[str, list[str]] = {}
    for name in found.roles:
        members.setdefault(root(name), []).append(name)
    for names in members.values():
        rows = {row for _, row in found.closed}
        yield LinearGroup(
            columns=tuple(name for name in names if name not in rows),
            rows=tuple(name for name in names if name in rows),
            inner_parameters=_sorted(found.inner.get(name, ()) for name in names),
            reductions=_sorted(found.reductions.get(name, ()) for name in names),
            leaks=any(name in leaked for name in names),
        )


def _sorted(sets: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({text for texts in sets for text in texts}))
