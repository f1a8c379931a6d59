"""Run a step as one stage of a pipeline: the user's code, with only the blocks of the stage real.

Blocks and modules before the stage's first block return NaN. At the call of that block (the seam) the tensors that
cross the cut are copied *in place* into the NaN tensors that the step holds, so that code around the blocks sees them
too. At the call of the next stage's first block the step is ended from inside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat
from lightning_par.parallel.pipeline import calls
from lightning_par.parallel.pipeline.absent import Absent
from lightning_par.parallel.pipeline.probe import Chain, Cut, Slot
from lightning_par.parallel.random import begin_stream, default_generator
from lightning_par.parallel.shards import class_name


class StageDone(BaseException):
    """Ends a step where the next stage begins. No `Exception`, so that user code does not take it for an error."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("a pipeline stage has ended")
        self.tensors = tensors


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        return cls(tuple(tensor.shape), tensor.dtype)


# By module, call and ordinal of the tensor: the dtype that a call returns, where it has been seen.
Dtypes = dict[tuple[str, int], dict[int, torch.dtype]]


@dataclass
class StageRun:
    """One run of a step as a stage.

    Attributes:
        begin: The first block that is real; of the first stage, 0.
        end: The block at whose call the step is ended; the number of blocks on the last stage.
        received: What crosses the cut before `begin`; None on the first stage.
        seed: Of the random numbers, the same on all stages of a micro-batch; None leaves the generators alone.
        stream: Distinguishes the random numbers inside blocks between data ranks.
        dtypes: What calls return, as far as it is known.
        protected: Tensors that are never written to: the batch.
        check: Look for NaN where there must be none.
        outline: Nothing is real: only the shapes of what crosses the cuts are wanted, in `metas`.
        compact: In such a run, let what comes after the last block take no memory.
    """

    begin: int
    end: int
    received: tuple[Tensor, ...] | None
    dtypes: Dtypes
    seed: int | None = None
    stream: int = 0
    protected: Sequence[Tensor] = ()
    check: bool = False
    outline: bool = False
    compact: bool = False
    seen: Dtypes = field(default_factory=dict)
    metas: dict[int, tuple[Meta, ...]] = field(default_factory=dict)
    next_block: int = 0
    inside: bool = False
    ended: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    kept: dict[tuple[str, int, bool], list[Tensor]] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether modules are real."""
        return not self.outline and (self.received is None or self.next_block > self.begin)


class Replay:
    """Answers the calls of the modules of a chain, in the run of a stage that is under way.

    Args:
        module: The root module.
        chain: Its chain.
        absent: By name, what stands in for a block or a module beside the blocks.
        owned: Names of those that this rank has.
        device: Where they run.

    Attributes:
        run: The run under way; None outside of steps.
        owned: Names of the blocks and modules beside them that this rank has.
        outside: Answers a call of the whole model while no run is under way.
    """

    def __init__(
        self, module: nn.Module, chain: Chain, absent: Mapping[str, Absent], owned: Iterable[str], device: torch.device
    ) -> None:
        self.chain = chain
        self.run: StageRun | None = None
        self.outside: Callable[[Callable[[], Any]], Any] | None = None
        self._absent = absent
        self.owned = frozenset(owned)
        self._device = device
        self._names = {module.get_submodule(name): name for name in (*chain.around, *chain.beside, *chain.blocks)}
        self._places = {name: place for place, name in enumerate(self._names.values(), 1)}
        self._blocks = {name: index for index, name in enumerate(chain.blocks)}
        self._around = set(chain.around)
        self._slots: dict[tuple[str, int, bool], None] = {slot[:3]: None for cut in chain.cuts for slot in cut.slots}

    def install(self) -> None:
        """Stand between the modules and their callers; outside of all hooks that they have by now."""
        for module in self._names:
            calls.intercept(module, self)

    def stage(self, run: StageRun, step: Callable[[], Any]) -> Any:
        """Run a step as a stage.

        Returns:
            The tensors that cross the cut before `run.end`, or on the last stage what the step returned.

        Raises:
            RuntimeError: If the step does not go through the chain as in the probe.
        """
        if run.seed is not None:
            _seed(run.seed, self._device)
        self.run = run
        try:
            result = step()
        except StageDone as done:
            return done.tensors
        finally:
            self.run = None
            run.kept.clear()
        if run.ended:
            raise ParallelConfigError(
                Problem(
                    "the step caught the exception that ends it at the end of a pipeline stage: there is an `except "
                    "BaseException` or a bare `except` around the call of the model",
                    "except Exception",
                )
            )
        if run.next_block < min(run.end, len(self.chain.blocks)):
            skipped = "; under a pipeline a step cannot return None to skip its batch" if result is None else ""
            raise RuntimeError(
                f"the step ended before block {self.chain.blocks[run.next_block]!r}; each step must call all "
                f"{len(self.chain.blocks)} blocks in order, as the one did from which the pipeline was made{skipped}"
            )
        return result

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, run = self._names[module], self.run
        if run is None:
            return self._call_outside(name, inner, args, kwargs)
        if run.inside or name in self._around:
            return inner(*args, **kwargs)
        call = run.counts.get(name, 0)
        run.counts[name] = call + 1
        if name in self._blocks:
            args, kwargs = self._at_block(run, name, args, kwargs)
        self._keep(run, (name, call, False), (args, kwargs))
        if run.live:
            result = self._real(run, name, call, inner, args, kwargs)
        else:
            compact = run.compact and run.next_block == len(self._blocks)
            result = self._absent[name].result(args, kwargs, run.dtypes.get((name, call), {}), compact=compact)
            result = self._received(run, (name, call, True), result)
        self._keep(run, (name, call, True), result)
        return result

    def _call_outside(self, name: str, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A recomputation in backward calls blocks that are here.
        if name in self.owned:
            return inner(*args, **kwargs)
        if name in self._around:
            assert self.outside is not None
            return self.outside(lambda: inner(*args, **kwargs))
        raise RuntimeError(
            f"{name!r} is called outside of a step, and is on another stage of the pipeline; call the whole model "
            f"({self.chain.around[0] or 'the LightningModule'}), on all ranks"
        )

    def _at_block(
        self, run: StageRun, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        block = self._blocks[name]
        if block != run.next_block:
            expected = self.chain.blocks[run.next_block] if run.next_block < len(self.chain.blocks) else ""
            if not expected:
                raise RuntimeError(
                    f"the step calls block {name!r} after all blocks: a step of a pipeline goes through the model "
                    "once. Move another call of it, such as generate(), out of the step, to on_validation_epoch_end"
                )
            raise RuntimeError(
                f"the step calls block {name!r} where {expected!r} is expected: blocks of a pipeline are called in one "
                "order, each once in a step"
            )
        cut = self.chain.cuts[block]
        if run.outline:
            run.metas[block] = tuple(Meta.of(t) for t in self._crossing(run, cut, name, args, kwargs))
        if block == run.end:
            run.ended = True
            raise StageDone(() if run.outline else tuple(map(_sendable, self._crossing(run, cut, name, args, kwargs))))
        if block == run.begin and run.received is not None and not run.outline:
            args, kwargs = self._inject(run, cut, name, args, kwargs)
        run.next_block += 1
        return args, kwargs

    def _real(
        self,
        run: StageRun,
        name: str,
        call: int,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        stream = None
        if run.seed is not None:
            # Sums of small numbers would meet: one micro-batch of a data rank and the next one of another.
            place = self._places[name]
            stream = begin_stream(self._device, hash((run.seed, place, call, run.stream)))
        run.inside = True
        try:
            result = inner(*args, **kwargs)
        finally:
            run.inside = False
            if stream is not None:
                stream.end()
        run.seen[name, call] = {i: t.dtype for i, t in enumerate(_compat.tensors_in(result))}
        return result

    # -- what crosses --------------------------------------------------------------------------------------------

    def _keep(self, run: StageRun, key: tuple[str, int, bool], data: Any) -> None:
        if key in self._slots:
            run.kept[key] = _compat.tensors_in(data)

    def _crossing(
        self, run: StageRun, cut: Cut, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """Find the tensors that cross a cut, in the order of its slots."""
        given = _compat.tensors_in((args, kwargs))
        found = []
        for slot in cut.slots:
            there = given if slot.module == name and not slot.output else run.kept.get(slot[:3], [])
            if slot.leaf >= len(there):
                raise _unlike_probe(name, slot)
            found.append(there[slot.leaf])
        return found

    def _received(self, run: StageRun, key: tuple[str, int, bool], result: Any) -> Any:
        """Put what crosses the cut before this stage into the result of an absent call, where it is found there.

        Then nothing is written over later: a checkpoint of the user around the next block has saved what that gets.
        """
        if run.received is None or run.outline or key not in self._slots:
            return result
        leaves, spec = _compat.flatten(result)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for slot, value in zip(self.chain.cuts[run.begin].slots, run.received, strict=True):
            if slot[:3] == key:
                if slot.leaf >= len(places):
                    raise _unlike_probe(key[0], slot)
                _refuse_other_meta(key[0], leaves[places[slot.leaf]], value)
                _refuse_checkpoint(key[0], value, in_place=False)
                # No leaf of the graph: the step may write to it.
                leaves[places[slot.leaf]] = value.clone()
        return _compat.unflatten(leaves, spec)

    def _inject(
        self, run: StageRun, cut: Cut, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert run.received is not None
        targets = self._crossing(run, cut, name, args, kwargs)
        if run.check:
            self._refuse_nan(name, targets, args, kwargs)
        replaced: dict[int, Tensor] = {}
        for slot, target, value in zip(cut.slots, targets, run.received, strict=True):
            if slot.output:  # put in when that call returned
                continue
            _refuse_other_meta(name, target, value)
            _refuse_checkpoint(name, value, in_place=True)
            if not _written(target, value, run.protected):
                replaced[id(target)] = value
        if not replaced:
            return args, kwargs
        at_call = {id(tensor) for tensor in _compat.tensors_in((args, kwargs))}
        if not replaced.keys() <= at_call:
            raise RuntimeError(
                f"a tensor that crosses to block {name!r} cannot be written to, and is no argument of it"
            )
        return _compat.map_tensors(lambda t: replaced.get(id(t), t), (args, kwargs))

    def _refuse_nan(self, name: str, targets: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        crossing = [t.untyped_storage().data_ptr() for t in targets]
        for index, tensor in enumerate(_compat.tensors_in((args, kwargs))):
            if has_nan(tensor) and tensor.untyped_storage().data_ptr() not in crossing:
                raise ParallelConfigError(
                    Problem(
                        f"tensor {index} of shape {tuple(tensor.shape)} among the arguments of block {name!r} depends "
                        "on modules of an earlier stage, and did not in the step from which the pipeline was made",
                        "use the same path through the model in training and evaluation; or pp_size=1",
                        "pp_size: 1",
                    )
                )


def _unlike_probe(name: str, slot: Slot) -> RuntimeError:
    return RuntimeError(
        f"at block {name!r} tensor {slot.leaf} of the {'result' if slot.output else 'arguments'} of {slot.module!r} is "
        "not there, which was in the step from which the pipeline was made"
    )


def _refuse_other_meta(name: str, target: Tensor, value: Tensor) -> None:
    if Meta.of(target) != Meta.of(value):
        raise RuntimeError(
            f"at {name!r} a stage received {Meta.of(value)} and expects {Meta.of(target)}: the step makes other shapes "
            "or dtypes than on the stage before"
        )


def _refuse_checkpoint(name: str, value: Tensor, *, in_place: bool) -> None:
    """Refuse a checkpoint of the user's own in which the graph would not reach what was received."""
    if not value.requires_grad:
        return
    fix = "activation_checkpointing='full' instead"
    if not torch.is_grad_enabled():
        raise ParallelConfigError(
            Problem(
                f"{name!r} is called without gradients in a training step, as reentrant checkpointing does: the stages "
                "before it would get none",
                f"checkpoint(..., use_reentrant=False), or {fix}",
                "activation_checkpointing: full",
            )
        )
    if in_place and _compat.has_saved_tensor_hooks():
        raise ParallelConfigError(
            Problem(
                f"{name!r} is called inside a checkpoint of your own, which has saved what it is called with before "
                "the stage could put in what it received",
                f"call nothing but the block in the checkpoint, on what the block before has returned; or {fix}",
                "activation_checkpointing: full",
            )
        )


def _written(target: Tensor, value: Tensor, protected: Sequence[Tensor]) -> bool:
    """Copy a value into a tensor that the step holds, where nothing else shares its memory."""
    if any(_compat.shares_storage(target, other) for other in protected):
        return False
    try:
        if target.grad_fn is not None:
            # Parameters of this stage were applied to NaN: what is written over has no gradient, and 0 x NaN is NaN.
            target.detach_()
        target.copy_(value)
    except RuntimeError:  # expanded, or a view that autograd does not let be written to
        return False
    return True


def _sendable(tensor: Tensor) -> Tensor:
    """What torch can send, and later detach in place: contiguous, and no view."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor has NaN in it; waits for the device."""
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any())


def _seed(seed: int, device: torch.device) -> None:
    """Start all generators that a step may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    generator = default_generator(device)
    if generator is not None and generator is not torch.default_generator:
        generator.manual_seed(seed)


def refuse_leak(module: nn.Module, name: str) -> ParallelConfigError:
    """What to say where a stage made NaN of numbers."""
    return ParallelConfigError(
        Problem(
            f"the stage of {class_name(module)} that begins with block {name!r} received no NaN and made one: either a "
            "value of an earlier stage reached it past the seam, or the model itself computes NaN in its first step",
            "run one step in one process and look for NaN there; if there is none, pp_size=1",
            "pp_size: 1",
        )
    )
