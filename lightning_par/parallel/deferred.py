"""Build modules on the meta device while recording how each tensor gets its value; compute any value later, alone.

**Recording.** Under `deferred_init` new tensors are on the meta device, and each operation that writes one is noted on
the *storage* it writes (`Node`), with its arguments and the state of the random generator. Views need no note, as a
view is known by its storage, offset and strides; for the same reason `Parameter(...)`, `.data`, `.to()` and `deepcopy`
need no care, and notes that nothing can reach any more are freed with their storage. Real tensors that an operation
reads are copied.

**Randomness.** A random operation on a meta tensor is also run once for real, on a tensor that is dropped at once. So
the caller's generator is at each moment where an ordinary build would have it: random numbers drawn on real tensors in
between, `manual_seed` or `fork_rng` inside the context, and everything after it come out equal. As each operation
knows its generator state, any value can be computed alone later: overwritten draws (a default initialisation replaced
by the model's own) are not repeated, a pipeline stage draws only what it owns, and no generator moves. The price is
that live random numbers are drawn twice (about 5 ns an element each time).

**Replay.** For one parameter at a time, the operations its value depends on are run again on the CPU, whatever the
device of the model; each intermediate is freed after its last use.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_par.parallel import _compat

META = torch.device("meta")
VERSION_MARK = "_version_after_deferred_init"
_aten = torch.ops.aten
# What these leave in the tensor they write does not depend on what it held before.
_OVERWRITING = {
    *(_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_),
}
_BLANK = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
    *(_aten.new_empty, _aten.new_empty_strided),
}
_UNKNOWN = (
    "{} reads a meta tensor of shape {} whose value is unknown: it was not built in deferred_init, or by a function "
    "that hides its data; build it inside, or with device='cpu'"
)
_clock = itertools.count()


class _State(threading.local):
    active = False
    suspended = False
    scratch: torch.UntypedStorage | None = None


_thread = _State()


@dataclass(eq=False)
class Node:
    """One storage that exists only as a recipe: the operations that wrote it, oldest first."""

    nbytes: int
    foreign: bool = True  # its creation was not recorded
    writes: list[Op] = field(default_factory=list)
    last_read: int = -1

    @property
    def unknown(self) -> bool:
        return self.foreign and self.nbytes > 0 and not self.writes


@dataclass(frozen=True)
class Ref:
    """A tensor, as a view of a storage."""

    node: Node
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class Op:
    """One recorded operation; tensors on the meta device are `Ref`s in its arguments, others are copies."""

    index: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: list[Node]
    written: list[Ref]
    overwrites: list[Node]  # storages whose earlier content is dead after it
    default_dtype: torch.dtype
    rng: Tensor | None
    outputs: list[Ref | None] = field(default_factory=list)  # None: an argument, or a view of one

    @property
    def blank(self) -> bool:
        return getattr(self.func, "overloadpacket", None) in _BLANK

    @property
    def nodes(self) -> set[Node]:
        return {*self.reads, *(r.node for r in self.written), *(r.node for r in self.outputs if r)}


def node_of(tensor: Tensor) -> Node | None:
    """Return the recipe of the tensor's storage, if any operation on it was recorded."""
    return _compat.storage_note(tensor)


def ref_of(tensor: Tensor) -> Ref:
    """Describe a meta tensor as a view of its storage's recipe."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError(f"deferred_init cannot record a {tensor.layout} or lazily conjugated tensor")
    if (node := node_of(tensor)) is None:
        _compat.set_storage_note(tensor, node := Node(tensor.untyped_storage().nbytes()))
    return Ref(node, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


# ---- replay ----------------------------------------------------------------------------------------------------------


def needed_ops(nodes: Iterable[Node], before: float) -> list[Op]:
    """List the operations that the content of `nodes` just before a moment depends on, in order."""
    found: dict[int, Op] = {}
    seen: set[tuple[Node, int]] = set()
    todo = [(node, before) for node in nodes]
    while todo:
        node, moment = todo.pop()
        for op in reversed(node.writes):
            if op.index >= moment:
                continue
            if (node, op.index) in seen:
                break
            seen.add((node, op.index))
            found[op.index] = op
            todo.extend((read, op.index) for read in op.reads if read is not node)
            if node in op.overwrites:
                break
    return [found[index] for index in sorted(found)]


def _run(op: Op, buffers: dict[Node, torch.UntypedStorage], *, live: bool = False) -> Any:
    """Run one operation on real storages; `live` draws from the caller's generators, else from the recorded state."""

    def thaw(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            if leaf.node not in buffers:
                buffers[leaf.node] = torch.UntypedStorage(leaf.node.nbytes)
            return leaf.view(buffers[leaf.node])
        if isinstance(leaf, torch.Generator) and not live:
            return torch.Generator().set_state(op.rng)  # type: ignore[arg-type]
        return leaf

    args, kwargs = _compat.map_leaves(thaw, (op.args, op.kwargs))
    if op.rng is not None and not live:
        torch.set_rng_state(op.rng)
    torch.set_default_dtype(op.default_dtype)
    out = op.func(*args, **kwargs)
    inputs = [t for t in _compat.leaves((args, kwargs)) if isinstance(t, Tensor)]
    for ref, value in zip(op.outputs, _tensors(out), strict=False):
        if ref is not None:
            buffers[ref.node] = _adopt(op, ref, value, inputs)
    return out


def _adopt(op: Op, ref: Ref, value: Tensor, inputs: list[Tensor]) -> torch.UntypedStorage:
    """Return the storage of a result, laid out as the meta device had promised it."""
    if value.shape != ref.size or value.dtype != ref.dtype:
        raise RuntimeError(
            f"{op.func} gave {tuple(value.shape)} {value.dtype} on the CPU but {tuple(ref.size)} {ref.dtype} on the "
            "meta device; its result cannot be deferred"
        )
    storage = value.untyped_storage()
    same_layout = value.stride() == ref.stride and value.storage_offset() == ref.offset
    if same_layout and not any(_compat.shares_storage(value, t) for t in inputs):
        return storage
    storage = torch.UntypedStorage(ref.node.nbytes)
    ref.view(storage).copy_(value)
    return storage


def evaluate(nodes: Sequence[Node], before: float = float("inf")) -> dict[Node, torch.UntypedStorage]:
    """Compute the content of storages at a moment; leaves every generator where it was."""
    ops = needed_ops(nodes, before)
    last_use = {node: op.index for op in ops for node in op.nodes}
    wanted = set(nodes)
    buffers: dict[Node, torch.UntypedStorage] = {}
    rng, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        with _compat.no_torch_modes(), torch.no_grad():
            for op in ops:
                _run(op, buffers)
                for node in op.nodes - wanted:
                    if last_use[node] == op.index:
                        buffers.pop(node, None)
    finally:
        torch.set_rng_state(rng)
        torch.set_default_dtype(dtype)
    for node in nodes:
        buffers.setdefault(node, torch.UntypedStorage(node.nbytes))
    return buffers


# ---- recording -------------------------------------------------------------------------------------------------------


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules on the meta device and record how their tensors get their values.

    Factory functions without a device give meta tensors; an explicit ``device="cpu"`` gives real ones. Code that looks
    at a value (`item`, `tolist`, `numpy`, `cpu`, `if tensor:`) gets it, computed on the spot. Nested use is one
    context. When the context ends, the generators are where an ordinary CPU build would have left them. Inside a nested
    ``torch.device("meta")`` nothing is recorded, and nothing drawn, as without this context.
    """
    if _thread.active:
        yield
        return
    _thread.active = True
    try:
        with (
            _compat.replaced_trunc_normal(_deferred_trunc_normal),
            _compat.around_inner_meta_context(_suspend),
            _Recorder(),
            _Factories(),
        ):
            yield
    finally:
        _thread.active, _thread.scratch = False, None
        _mark_versions()


def _mark_versions() -> None:
    """Remember the version counters, so that changes made after the context, which meta tensors forget, are noticed."""
    for obj in gc.get_objects():
        if type(obj) not in (Tensor, nn.Parameter) or obj.device != META or obj.layout != torch.strided:
            continue
        if node_of(obj) is not None and not obj.is_inference():
            setattr(obj, VERSION_MARK, obj._version)


@contextmanager
def _suspend() -> Iterator[None]:
    before, _thread.suspended = _thread.suspended, True
    try:
        yield
    finally:
        _thread.suspended = before


class _Factories(TorchFunctionMode):
    """Sends factory functions to the meta device, and mends the functions that lose Python data there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _thread.suspended:
            return func(*args, **kwargs)
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False  # torch.nn.init and others skip the work for meta tensors
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            return _from_data(func, args, kwargs)
        if func in (Tensor.numpy, Tensor.__array__):
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return func(args[0], _real_index(args[1]), *args[2:])
        by_size = func is torch.normal and not isinstance(args[0], Tensor) and (len(args) > 2 or "size" in kwargs)
        if (func in _compat.factory_functions() or by_size) and kwargs.get("device") is None:
            kwargs["device"] = META
        return func(*args, **kwargs)


def _from_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    own = args[0].device if func is Tensor.new_tensor else META
    if torch.device(kwargs.get("device") or own).type != "meta" or any(isinstance(a, Tensor) for a in args[-1:]):
        return func(*args, **kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    real = func(*args, **kwargs | {"device": "cpu"})
    # An empty one stays real: libraries probe with it whether the user asked for a device.
    return (real.to(META) if real.numel() else real).requires_grad_(requires_grad)


def _real_index(index: Any) -> Any:
    """Turn lists and arrays into index tensors on the CPU; torch would make meta ones and lose their values."""
    if isinstance(index, tuple):
        return tuple(_real_index(i) for i in index)
    if isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor)):
        try:
            return torch.tensor(index, device="cpu", dtype=None if len(index) else torch.long)
        except (TypeError, ValueError):  # a list of slices
            return index
    return index


class _Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _compat.no_function_modes():
            return func(*args, **kwargs or {}) if _thread.suspended else _dispatch(func, args, kwargs or {})


def _tensors(data: Any) -> list[Tensor]:
    return [leaf for leaf in _compat.leaves(data) if isinstance(leaf, Tensor)]


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    to_meta = device is not None and torch.device(device).type == "meta"
    shape_only = func.overloadpacket.__name__.startswith("new_") or func.overloadpacket.__name__.endswith("_like")
    if not to_meta and (device and shape_only or not any(t.device == META for t in _tensors((args, kwargs)))):
        return func(*args, **kwargs)
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    marked = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = _tensors([given.get(a.name) for a in marked])
    if len({t.device == META for t in written}) == 2:
        raise NotImplementedError(f"{func} writes meta and real tensors at once, which deferred_init cannot record")
    gives_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if (device and not to_meta) or any(t.device != META for t in written) or not (written or gives_tensors):
        return func(*_compat.map_leaves(_value, args), **_compat.map_leaves(_value, kwargs))
    if torch.Tag.inplace_view in func.tags:
        return func(*args, **kwargs)
    overwriting = func.overloadpacket in _OVERWRITING or all(a.is_out for a in marked)
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _record(func, args, kwargs, written, overwriting=overwriting, random=random)


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device != META:
        return leaf
    ref = ref_of(leaf)
    if ref.node.unknown:
        raise RuntimeError(_UNKNOWN.format("code that looks at a value", tuple(ref.size)))
    return ref.view(evaluate([ref.node])[ref.node])


def _deferred_trunc_normal(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Record rejection sampling as one operation: how often it draws depends on the values."""
    if tensor.device != META or _thread.suspended or not _thread.active:
        return original(tensor, *args, **kwargs)
    with _compat.no_function_modes():
        return _record(original, (tensor, *args), kwargs, [tensor], overwriting=True, random=True, result=tensor)


def _record(
    func: Any, args: Any, kwargs: Any, written: list[Tensor], *, overwriting: bool, random: bool, result: Any = None
) -> Any:
    """Run an operation on the meta device and note it on each storage that it writes or makes."""
    generator = next((g for g in _compat.leaves((args, kwargs)) if isinstance(g, torch.Generator)), None)
    meta = [t for t in _tensors((args, kwargs)) if t.device == META]
    refs = {id(t): ref_of(t) for t in meta}
    read = [id(t) for t in meta]
    for tensor in written if overwriting else ():
        read.remove(id(tensor))
    unknown = next((refs[i] for i in read if refs[i].node.unknown), None)
    if unknown and any(not refs[id(t)].node.unknown for t in written):
        raise RuntimeError(_UNKNOWN.format(func, tuple(unknown.size)))
    if unknown:
        return func(*args, **kwargs)  # its results are as unknown
    reads = list(dict.fromkeys(refs[i].node for i in read))
    whole = [refs[id(t)].node for t in written if overwriting and refs[id(t)].nbytes >= refs[id(t)].node.nbytes]

    def freeze(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return refs[id(leaf)] if id(leaf) in refs else leaf.detach().clone()
        return torch.device("cpu") if leaf == META and isinstance(leaf, torch.device) else leaf

    op = Op(
        index=next(_clock),
        func=func,
        args=_compat.map_leaves(freeze, args),
        kwargs=_compat.map_leaves(freeze, kwargs),
        reads=reads,
        written=[refs[id(t)] for t in written],
        overwrites=[node for node in whole if node not in reads],
        default_dtype=torch.get_default_dtype(),
        rng=(generator or torch.default_generator).get_state() if random else None,
    )
    done = False
    if result is None:
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # no meta kernel, a size that depends on values, or mixed devices
            if not written and any(r.alias_info is not None for r in func._schema.returns):
                raise  # a view
            result, done = _result_by_running(op, written), True
    _link(op, result, meta)
    if random and not done and (op.written or any(op.outputs)):
        _run_live(op)
    return result


def _link(op: Op, result: Any, inputs: list[Tensor]) -> None:
    """Note an operation on the storages that hold its results; one that only made views is not noted."""
    for tensor in _tensors(result):
        new = tensor.device == META and not any(_compat.shares_storage(tensor, t) for t in inputs)
        op.outputs.append(ref_of(tensor) if new else None)
    made = list(dict.fromkeys(ref.node for ref in op.outputs if ref is not None))
    op.overwrites += made
    targets = list(dict.fromkeys([*(ref.node for ref in op.written), *made]))
    for node in made:
        node.foreign = False
    for node in op.reads:
        if any(target is not node for target in targets):
            node.last_read = op.index
    for node in targets:
        if node in op.overwrites and node.writes and node.last_read < node.writes[0].index:
            node.writes.clear()  # nothing has looked at what is overwritten here
        node.writes.append(op)


def _run_live(op: Op) -> Any:
    buffers = evaluate(op.reads, op.index)
    for node in {ref.node for ref in op.written[:1]} - buffers.keys():
        # One buffer for all: freed ones would leave holes in the heap, which the small random states then break up.
        if _thread.scratch is None or _thread.scratch.nbytes() < node.nbytes:
            _thread.scratch = torch.UntypedStorage(node.nbytes)
        buffers[node] = _thread.scratch
    with _compat.no_torch_modes(), torch.no_grad():
        return _run(op, buffers, live=True)


def _result_by_running(op: Op, written: list[Tensor]) -> Any:
    """Get the shapes of a result from a real run; an error of the user's own comes out as in an ordinary build."""
    values = _run_live(op)
    if written:
        return written[0] if isinstance(values, Tensor) else values and type(values)(written)
    return _compat.map_tensors(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=META), values)
