"""Prove with one run of a step that it is a chain of blocks, and find what each cut through that chain must carry.

Every operator of the run is watched. What depends on a parameter is marked, with the place in the chain where it was
made. A stage that does not own that place cannot make it: so where it is used after a cut, it must cross the cut. This
finds what comparisons and integers would hide from a test for NaN. What cannot cross is refused with its name.

The place is a number: 0 before the first block, k + 1 once block k (from 0) was called, until the next one is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.parallel import _compat
from lightning_par.parallel.pipeline import calls
from lightning_par.parallel.pipeline._probe_compat import (
    DispatchMode,
    fake_parameters,
    flops_of,
    is_fake,
    is_view,
    schema_name,
    written,
)
from lightning_par.parallel.random import random_state_kept
from lightning_par.parallel.shards import class_name

# Their results tell of a tensor its shape, and none of its values.
_SHAPE_ONLY = (
    "device",
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
)

_READS = ("_local_scalar_dense", "is_nonzero", "equal")


class Slot(NamedTuple):
    """Where a tensor is met that crosses a cut.

    Attributes:
        module: Name of the block, or of the module beside the blocks, that was called.
        call: Which of its calls.
        output: Whether it is in what that call returned, or in its arguments.
        leaf: Its place among the tensors there.
    """

    module: str
    call: int
    output: bool
    leaf: int


@dataclass(frozen=True)
class Cut:
    """A cut before one block.

    Attributes:
        slots: The tensors that cross it.
        refused: Why the chain cannot be cut here; empty where it can.
        fix: What would help.
    """

    slots: tuple[Slot, ...]
    refused: str = ""
    fix: str = ""


class Outline(NamedTuple):
    """What a call returned.

    Attributes:
        spec: The containers around the leaves.
        leaves: For each leaf the index of the argument leaf that it resembles (a tensor of the same shape, dtype and
            device, or the very same object), or None.
        passed: Whether it is that argument, as a mask that a block hands on.
        constants: The leaves that are no tensors.
        tensors: Which leaves are tensors.
    """

    spec: Any
    leaves: tuple[int | None, ...]
    passed: tuple[bool, ...]
    constants: tuple[Any, ...]
    tensors: tuple[bool, ...]


@dataclass(frozen=True)
class Chain:
    """What the run of a step has shown.

    Attributes:
        blocks: Names of the blocks in the order of their calls.
        beside: Names of the modules outside the blocks that hold parameters and were called, the outermost of each.
        around: Names of the modules whose call the chain is part of, outermost first.
        cuts: For each block the cut before it; that before the first one carries nothing.
        uses: For each parameter, by its first name, the places where it is used.
        outlines: What the first call of each of these modules returned.
        block_flops: Forward FLOPs of each block in the run.
        prefix_flops: Forward FLOPs before the first block.
        suffix_flops: Forward FLOPs after the last block.
        source: Where the inputs of the run came from.
    """

    blocks: tuple[str, ...]
    beside: tuple[str, ...]
    around: tuple[str, ...]
    cuts: tuple[Cut, ...]
    uses: dict[str, frozenset[int]]
    outlines: dict[str, Outline]
    block_flops: tuple[float, ...]
    prefix_flops: float
    suffix_flops: float
    source: str = ""


class _Met(NamedTuple):
    """Where a marked tensor was met, with its number of elements, and how often it had been written to."""

    slot: Slot
    size: int
    version: int


@dataclass
class _Value:
    """A mark on a storage that depends on parameters."""

    born: int
    maker: str
    met: list[_Met] = field(default_factory=list)
    last_used: int = -1
    user: str = ""


class _Parameter(NamedTuple):
    """A mark on the storage of a parameter."""

    name: str


def probe(module: nn.Module, blocks: Sequence[str], run: Callable[[], Any], source: str, device: torch.device) -> Chain:
    """Run a step once under watch; the module is afterwards as before.

    Nothing is computed where the step can run on shapes alone; else it is run for real.

    Args:
        module: The whole model.
        blocks: Names of its blocks, in any order.
        run: Runs the step on a few samples.
        source: Where those come from, in words.
        device: Where the step will run.

    Raises:
        ParallelConfigError: If the step is no chain of blocks: each reason with its fix.
    """
    on_meta = any(param.is_meta for param in module.parameters())
    modes: list[Callable[[], AbstractContextManager[Any]]] = [lambda: fake_parameters(module, device), nullcontext]
    failures: list[Exception] = []
    for mode in modes:
        watch = _Watch(module, blocks)
        try:
            with watch.watching(), mode():
                watch.before_run()
                with torch.no_grad(), watch.operators:
                    run()
        except _Stopped:
            pass
        except Exception as error:  # the user's own code
            failures.append(error)
            if on_meta and watch.read_at is not None:
                # There is no value to read, and where there is one it would be refused.
                watch.refuse_read(watch.read_at, len(watch.block_names))
            continue
        return watch.chain(source)
    where = "on the meta device" if on_meta else "for real"
    failure = failures[-1]
    raise ParallelConfigError(
        Problem(
            f"a pipeline is cut where a run of the step shows its blocks, and {source} fails when it is run {where}: "
            f"{type(failure).__name__}: {failure} (the traceback of it is above)",
            "mend the step; where it fails only because its samples are not those of a run, give "
            "example_inputs=<the arguments of the model's forward>",
            "example_inputs: ...",
        )
    ) from failure


class _Stopped(BaseException):
    """Ends a run that has shown a problem after which nothing more can be learned."""


class _Watch:
    """One watched run."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        self.module = module
        self.names = {child: name for name, child in module.named_modules()}
        self.block_names = set(blocks)
        self.around = {child for child, name in self.names.items() if _contains(name, blocks)}
        self.problems = Problems()
        self.operators = _Operators(self)
        self.place = 0
        self.called: list[str] = []
        self.beside: dict[str, None] = {}
        self.uses: dict[str, set[int]] = defaultdict(set)
        self.values: list[_Value] = []
        self.outlines: dict[str, Outline] = {}
        self.order: list[tuple[str, int]] = []
        self.calls: Counter[str] = Counter()
        self.flops: dict[tuple[int, bool], float] = defaultdict(float)
        self.stack: list[nn.Module] = []
        self.path: tuple[str, ...] = ()
        self.inside: nn.Module | None = None
        self.read_at: tuple[int, str] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        inside = {child for name in self.block_names for child in self.module.get_submodule(name).modules()}
        blocks = {self.module.get_submodule(name) for name in self.block_names}
        watched = [m for m in self.names if m in self.around or m in blocks or (m not in inside and _holds_state(m))]
        buffers = [(b, b.detach().clone()) for b in self.module.buffers() if not b.is_meta]
        for child in watched:
            calls.intercept(child, self)
        try:
            with random_state_kept():
                yield
        finally:
            for child in watched:
                calls.release(child)
            for param in self.module.parameters():
                _compat.set_storage_note(param, None)
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

    def before_run(self) -> None:
        """Mark the parameters, which a mode may have replaced."""
        for name, param in self.module.named_parameters():
            _compat.set_storage_note(param, _Parameter(name))

    # -- calls of modules ------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.names[module]
        if self.inside is not None or module in self.around:
            self.stack.append(module)
            try:
                return inner(*args, **kwargs)
            finally:
                self.stack.pop()
        given = _compat.leaves((args, kwargs))
        if name in self.block_names:
            self._begin_block(name)
        else:
            self.beside.setdefault(name)
        call = self.calls[name]
        self.calls[name] += 1
        self.order.append((name, call))
        self._meet(name, call, False, given)
        self.inside = module
        try:
            result = inner(*args, **kwargs)
        finally:
            self.inside = None
        leaves, spec = _compat.flatten(result)
        arguments = [leaf for leaf in given if isinstance(leaf, Tensor)]
        handed_on = [isinstance(leaf, Tensor) and _shares(leaf, arguments) for leaf in leaves]
        for leaf, old in zip(leaves, handed_on, strict=True):
            if isinstance(leaf, Tensor) and not old:
                # Also what depends on no parameter: only a stage that runs the module has it.
                self.made(leaf)
        self._meet(name, call, True, leaves, handed_on)
        self.outlines.setdefault(name, _outline(given, leaves, spec))
        return result

    def _begin_block(self, name: str) -> None:
        if name in self.called:
            self.problems.add(
                f"block {name!r} ({class_name(self.module.get_submodule(name))}) is called twice in one step; each "
                "stage of a pipeline runs once for a micro-batch",
                "pp_size=1; or, where the step calls the whole model twice, one call on both inputs concatenated",
                "pp_size: 1",
            )
            raise _Stopped
        self.called.append(name)
        self.place += 1
        if self.place == 1:
            self.path = tuple(self.names[module] for module in self.stack)

    def _meet(self, name: str, call: int, output: bool, leaves: Sequence[Any], handed_on: Sequence[bool] = ()) -> None:
        """Note where marked tensors are seen, so that a stage can find them again."""
        index = 0
        for leaf, old in zip(leaves, handed_on or [False] * len(leaves), strict=True):
            if not isinstance(leaf, Tensor):
                continue
            value = _mark(leaf)
            if isinstance(value, _Value):
                # What a call hands on may be held under its old name.
                version = -1 if old else _compat.tensor_version(leaf)
                value.met.append(_Met(Slot(name, call, output, index), leaf.numel(), version))
            index += 1

    # -- operators -------------------------------------------------------------------------------------------------

    @property
    def in_block(self) -> bool:
        """Whether a block runs."""
        return self.inside is not None and self.names[self.inside] in self.block_names

    def where(self) -> str:
        """Say where the run is."""
        if self.inside is not None:
            return f"{self.names[self.inside]} ({class_name(self.inside)})"
        owner = class_name(self.stack[-1]) if self.stack else class_name(self.module)
        return f"the forward of {owner}" if self.stack else f"the step of {owner}"

    def used(self, tensor: Tensor, operator: str) -> None:
        """Note that an operator reads a tensor."""
        mark = _mark(tensor)
        if isinstance(mark, _Parameter):
            self.uses[mark.name].add(self.place)
        elif isinstance(mark, _Value) and self.place > mark.last_used:
            mark.last_used, mark.user = self.place, f"{operator} in {self.where()}"

    def made(self, tensor: Tensor, *, anew: bool = False) -> None:
        """Mark what an operator has made of something marked; what it has written over is made anew."""
        mark = _mark(tensor)
        if mark is None or (anew and isinstance(mark, _Value) and mark.born < self.place):
            value = _Value(self.place, self.where())
            self.values.append(value)
            _compat.set_storage_note(tensor, value)

    def read(self) -> None:
        """Python reads a number that depends on parameters."""
        if self.inside is None and self.read_at is None:
            self.read_at = self.place, f"{self.where()} reads a value of the hidden state"

    def refuse_read(self, read_at: tuple[int, str], count: int) -> None:
        """Raise for a value that Python has read between the blocks."""
        self.problems.add(
            f"{read_at[1]} after {read_at[0]} of {count} blocks, which only one stage of a pipeline has",
            "keep decisions on hidden values inside a block, or use torch.where instead of `if`; or pp_size=1",
            "pp_size: 1",
        )
        self.problems.raise_if_any()

    # -- the result ------------------------------------------------------------------------------------------------

    def chain(self, source: str) -> Chain:
        if not self.called and not list(self.problems):
            self.problems.add(
                f"{source} calls none of the {len(self.block_names)} blocks, such as {min(self.block_names)!r}",
                "blocks=[<the class of the blocks that the step calls>]",
            )
        count = len(self.called)
        # After the last block only one stage goes on.
        if self.read_at is not None and self.read_at[0] < count:
            self.refuse_read(self.read_at, count)
        self.problems.raise_if_any()
        flops = [self.flops[place, True] for place in range(1, count + 1)]
        between = [self.flops[place, False] for place in range(1, count)]
        return Chain(
            blocks=tuple(self.called),
            beside=tuple(self.beside),
            around=self.path,
            cuts=tuple(self._cut(place) for place in range(count)),
            uses={name: frozenset(places) for name, places in self.uses.items()},
            outlines=self.outlines,
            block_flops=tuple(own + more for own, more in zip(flops, [*between, 0.0], strict=True)),
            prefix_flops=self.flops[0, False],
            suffix_flops=self.flops[count, False],
            source=source,
        )

    def _cut(self, block: int) -> Cut:
        """See what crosses the cut before a block (from 0)."""
        if block == 0:
            return Cut(())
        name = self.called[block]
        order = self.order.index((name, 0))
        slots: list[Slot] = []
        for value in self.values:
            if not value.born <= block < value.last_used:
                continue
            at_cut = [met for met in value.met if met.slot.module == name and not met.slot.output]
            earlier = [met for met in value.met if self.order.index((met.slot.module, met.slot.call)) < order]
            if 1 <= value.born < block:
                return self._skip(value, block)
            if not at_cut and not earlier:
                return self._unseen(value, block)
            found = max(at_cut or earlier, key=lambda met: met.size)
            # As it was returned just before, where nothing was written to it since.
            last = self.order[order - 1]
            returned = [met for met in earlier if met.slot[:3] == (*last, True) and met[1:] == found[1:]]
            slots.append(returned[0].slot if returned else found.slot)
        return Cut(tuple(sorted(slots)))

    def _skip(self, value: _Value, block: int) -> Cut:
        return Cut(
            (),
            f"what {value.maker} makes after block {self.called[value.born - 1]!r} is used past the next block "
            f"{self.called[block - 1]!r}, by {value.user}: a skip connection, or the live output of an encoder, that "
            "would have to go over several stages",
            "pp_split that keeps both on one stage, or pp_size=1",
        )

    def _unseen(self, value: _Value, block: int) -> Cut:
        return Cut(
            (),
            f"a tensor that {value.maker} makes is used past the cut before {self.called[block]!r}, by {value.user}, "
            "and is neither an argument of that block nor an argument or result of a module before it",
            "pass it to the blocks as an argument, or compute it in a module of its own; or pp_size=1",
        )


class _Operators(DispatchMode):
    """Follows what depends on parameters through all operators."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch
        self.last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch = self._watch
        self.last = schema_name(func)
        given = _compat.tensors_in((args, kwargs))
        marks = [_mark(tensor) for tensor in given]
        # As good as the parameter itself: each stage that uses it makes it anew.
        is_alias = len(given) == 1 and isinstance(marks[0], _Parameter) and (is_view(func) or self.last == "_to_copy")
        if not is_alias and self.last not in _SHAPE_ONLY:
            for tensor in given:
                watch.used(tensor, self.last)
        depends = any(mark is not None for mark in marks)
        if depends and self.last in _READS:
            watch.read()
            if any(is_fake(tensor) for tensor in given) and watch.place == len(watch.block_names):
                # The number of a loss that is printed or logged; nothing that is made of it counts.
                return given[0].dtype.is_floating_point and 1.0
        result = func(*args, **kwargs)
        watch.flops[watch.place, watch.in_block] += flops_of(func, args, kwargs, result)
        if not depends:
            return result
        made = _compat.tensors_in(result)
        for tensor in made:
            if is_alias:
                _compat.set_storage_note(tensor, marks[0])
            elif self.last not in _SHAPE_ONLY:
                watch.made(tensor)
        for tensor in written(func, args, kwargs):
            watch.made(tensor, anew=True)
        return result


def _shares(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(_compat.shares_storage(tensor, other) for other in others)


def _mark(tensor: Tensor) -> _Value | _Parameter | None:
    mark = _compat.storage_note(tensor)
    return mark if isinstance(mark, _Value | _Parameter) else None


def _outline(given: Sequence[Any], leaves: Sequence[Any], spec: Any) -> Outline:
    def resembles(leaf: Any, other: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return leaf is other and leaf is not None
        return isinstance(other, Tensor) and (leaf.shape, leaf.dtype, leaf.device) == (
            other.shape,
            other.dtype,
            other.device,
        )

    def is_passed(leaf: Any, other: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return resembles(leaf, other)
        return resembles(leaf, other) and _compat.shares_storage(leaf, other) and leaf.stride() == other.stride()

    like: list[int | None] = []
    passed = []
    for leaf in leaves:
        same = [i for i, other in enumerate(given) if is_passed(leaf, other)]
        like.append(next(iter(same), next((i for i, other in enumerate(given) if resembles(leaf, other)), None)))
        passed.append(bool(same))
    tensors = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    constants = tuple(None if tensor else leaf for tensor, leaf in zip(tensors, leaves, strict=True))
    return Outline(spec, tuple(like), tuple(passed), constants, tensors)


def _holds_state(module: nn.Module) -> bool:
    """Whether a module has what only its stage keeps: parameters, or statistics of what it saw."""
    return any(True for _ in module.parameters()) or any(isinstance(m, _NormBase) for m in module.modules())


def _contains(name: str, blocks: Sequence[str]) -> bool:
    prefix = f"{name}." if name else ""
    return any(block.startswith(prefix) and block != name for block in blocks)
