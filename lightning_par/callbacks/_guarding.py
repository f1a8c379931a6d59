"""What `NaNRewind` is made of: the window of an optimizer step, what is refused, and what is told."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.guard import Counters, Reading, StepGuard, Verdict, values_of
from lightning_par.resilience.snapshots import SnapshotRing, host_memory, put_back
from lightning_par.strategies import MeshStrategy, _compat_steps, rewinding

log = logging.getLogger("lightning_par.callbacks.nan_rewind")

_MAX_SAMPLES = 16


@dataclass
class Window:
    """The batches of one optimizer step, and what they change beside parameters.

    Attributes:
        buffers: Copies by name; their memory is used again by the next window.
        is_open: Whether a batch of it has begun.
        batches: How many have.
        losses: Of its micro-batches, since the last optimizer step.
        judged: Those by which the last optimizer step was judged.
        random: The state of the default generators before it.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    is_open: bool = False
    batches: int = 0
    losses: list[Tensor] = field(default_factory=list)
    judged: list[Tensor] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def open(self, module: nn.Module | None) -> None:
        """Begin, with copies of the buffers of a module; which of them it is going to change nobody knows before."""
        self.is_open, self.losses, self.random = True, [], random_state()
        for name, buffer in [] if module is None else module.named_buffers():
            kept = self.buffers.get(name)
            if buffer.is_meta:
                continue
            if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype or kept.device != buffer.device:
                self.buffers[name] = buffer.detach().clone()
            else:
                kept.copy_(buffer)

    def take_losses(self) -> list[Tensor]:
        """The losses that an optimizer step is judged by; several optimizers may step by the same."""
        self.judged, self.losses = self.losses or self.judged, []
        return self.judged

    def restore(self, module: nn.Module) -> None:
        """Leave buffers and generators as if the window had never been."""
        set_random_state(self.random)
        self.restore_buffers(module)

    @torch.no_grad()
    def restore_buffers(self, module: nn.Module, *, only_bad: bool = False) -> None:
        """Put the buffers back; with `only_bad` those that are not finite."""
        for name, buffer in module.named_buffers():
            if name in self.buffers and not (only_bad and bool(torch.isfinite(buffer).all())):
                put_back(buffer, self.buffers[name])


@dataclass(frozen=True)
class At:
    """Which optimizer step it is.

    Attributes:
        step: Its number.
        epoch: Its epoch.
        batches: How many batches of the epoch have been read.
        window: How many of them are of the step.
    """

    step: int
    epoch: int
    batches: int
    window: int

    @classmethod
    def now(cls, trainer: pl.Trainer, window: Window) -> At:
        """The one that is about to be taken."""
        return cls(trainer.global_step, trainer.current_epoch, rewinding.batches_done(trainer), window.batches)

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, batch {self.batches - 1})"


@dataclass(frozen=True)
class Facts:
    """What one rank knows of a step that is left out.

    Attributes:
        losses: Of the micro-batches.
        norm: Of its gradients.
        parameter: The first one whose gradient is not finite.
        samples: Their indices in the dataset, where they are known.
    """

    losses: tuple[float, ...]
    norm: float
    parameter: str | None
    samples: list[Any] | None

    def is_bad(self, verdict: Verdict) -> bool:
        """Whether it is this rank that has what the verdict is about."""
        if verdict.rule == "spike":
            mean = math.fsum(self.losses) / max(len(self.losses), 1)
            return (mean if verdict.what == "loss" else self.norm) > verdict.limit
        values = self.losses if verdict.what == "loss" else (self.norm,)
        return verdict.what == "parameters" or not all(map(math.isfinite, values))


def describe(at: At, verdict: Verdict, everyone: Sequence[Facts], ranks: Sequence[int]) -> str:
    """Say what was wrong with a step, on which ranks, with their values and samples."""
    what = {
        "nonfinite": f"the {verdict.what} {'is' if verdict.what == 'loss' else 'are'} not finite",
        "spike": spike(verdict),
        "parameters": "parameters or optimizer state are not finite",
    }[verdict.rule]
    lines = [f"{at}: {what}, on rank {', '.join(map(str, ranks))} of {len(everyone)}"]
    for rank in ranks:
        facts = everyone[rank]
        losses = ", ".join(f"{loss:.5g}" for loss in facts.losses)
        line = f"  - rank {rank}: loss {losses or 'unknown'}; gradient norm {facts.norm:.5g}"
        if facts.parameter is not None:
            line += f"; first in {facts.parameter}"
        if facts.samples is not None:
            more = ", ..." if len(facts.samples) > _MAX_SAMPLES else ""
            line += f"; samples {', '.join(map(str, facts.samples[:_MAX_SAMPLES]))}{more}"
        lines.append(line)
    return "\n".join(lines)


def spike(verdict: Verdict) -> str:
    """Name a spike."""
    what = "a loss" if verdict.what == "loss" else "a gradient norm"
    return f"{what} of {verdict.value:.5g} is above {verdict.limit:.5g}"


def log_on_rank_zero(trainer: pl.Trainer, text: str) -> None:
    """Warn once."""
    if trainer.is_global_zero:
        log.warning(text)


def first_bad(module: nn.Module) -> str | None:
    """The first parameter that is not finite or whose gradient is not, or None."""
    for name, param in module.named_parameters():
        for tensor in (param, param.grad):
            if tensor is not None and not _is_finite(tensor):
                return name
    return None


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(torch.isfinite(values_of(tensor.detach())).all())


def not_finite(module: nn.Module) -> set[int]:
    """The `id` of each parameter that is not finite, such as one that forbids something by an infinity."""
    return {id(param) for param in module.parameters() if not _is_finite(param)}


def state_tensors(module: nn.Module, optimizers: Sequence[Optimizer], without: Collection[int]) -> Iterator[Tensor]:
    """Parameters, without those of some `id`, and optimizer state."""
    yield from (param for param in module.parameters() if not param.is_meta and id(param) not in without)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # Some keep numbers of their own beside the states of parameters.
            values = state.values() if isinstance(state, dict) else ()
            yield from (value for value in values if isinstance(value, Tensor))


def unscaled(reading: Reading, optimizer: Optimizer, scale: float | None) -> Reading:
    """Take the scale of an fp16 scaler out of what was read."""
    if scale is None:
        return reading
    # Such optimizers take it out of the gradients themselves, later.
    later = _compat_steps.takes_out_scale(optimizer)
    losses = tuple(loss / scale for loss in reading.losses)
    return Reading(losses, reading.norm / (scale if later else 1.0), reading.corrupt)


def drop_gradients(optimizer: Optimizer) -> None:
    """Set the gradients to None of all parameters that an optimizer steps."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def ask_before_step(optimizer: Optimizer, taken: Callable[[], bool]) -> Callable[[], None]:
    """Let an optimizer run its closure first, and step only if it is told to; else the gradients are dropped.

    Without gradients the optimizers of torch stand still by themselves, but not others, nor hooks of steps; and hooks
    of the module that look at gradients before a step would find none.

    Returns:
        A function that undoes it.
    """
    patched = optimizer.__dict__.get("step")
    step: Any = optimizer.step

    # What it is marked with: schedulers look whether it is still the step that they have seen.
    @functools.wraps(step)
    def ask(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            # An optimizer may run it again; the first time is this one.
            runs = itertools.chain([lambda: loss], itertools.repeat(closure))
            kwargs["closure"] = lambda: next(runs)()
        if taken():
            return step(**kwargs)
        drop_gradients(optimizer)
        return loss

    ask.__dict__["asks"] = True

    def undo() -> None:
        if patched is None:
            optimizer.__dict__.pop("step", None)
        else:
            optimizer.step = patched  # type: ignore[method-assign]

    # A scheduler that is made later wraps it as a method.
    optimizer.step = MethodType(ask, optimizer)  # type: ignore[method-assign]
    return undo


def may_step(trainer: pl.Trainer, verdicts: Sequence[Verdict], said: list[str]) -> bool:
    """Whether an optimizer may step by the last verdict of a batch; if there is none it may, which is said once."""
    if verdicts:
        return verdicts[-1].taken
    if not said:
        said.append(
            "NaNRewind does not see all steps: one was taken without Lightning, as by `self.optimizers("
            "use_pl_optimizer=False)` or outside of `training_step`. Such steps are taken whatever they do."
        )
        log_on_rank_zero(trainer, said[0])
    return True


def asks_before_step(optimizer: Optimizer) -> bool:
    """Whether `ask_before_step` was called for an optimizer: it was not for one that has come during a fit."""
    return getattr(optimizer.step, "asks", False)


def diverged(text: str, counters: Counters, ring: SnapshotRing | None) -> str:
    """Say after the last bad step how the run went, and what to look at."""
    tried = [] if ring is None else [snapshot.extra["fit"]["step"] for snapshot in ring]
    return (
        f"{text}\nOf {counters.attempts} steps {counters.skipped} were left out. Training has gone back to a "
        f"checkpoint {counters.reloads} times, and since then to memory {len(counters.rewinds)} times (snapshots "
        f"of steps {tried}). Starting it again would end here again: look at these samples, at the learning rate, "
        "and at what the loss divides by or takes the logarithm of."
    )


def fits_memory(trainer: pl.Trainer, ring: SnapshotRing, control: StepControl, *, or_refuse: bool) -> bool:
    """Whether the snapshots fit into the memory of all ranks, which is refused or said if they do not; collective."""
    problems = Problems()
    available = host_memory(max(1, trainer.num_devices))
    for rank, found in enumerate(control.gather(ring.problems(available))):
        for one in found:
            problems.add(f"rank {rank}: {one.what}", one.python, one.yaml)
    if or_refuse:
        problems.raise_if_any()
    if len(problems):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        log_on_rank_zero(trainer, f"NaNRewind leaves steps out and cannot go back to memory:\n{listed}")
    return not len(problems)


def explain_nothing_returned(trainer: pl.Trainer, exception: BaseException) -> None:
    """Say more about the error that `training_step` has returned None on one of several ranks."""
    if "returning None" in str(exception):
        exception.add_note(
            f"rank {trainer.global_rank}, step {trainer.global_step}: the other ranks wait for gradients that will "
            "not come. NaNRewind leaves bad steps out by itself: return the loss, whatever it is."
        )


def prepare_to_go_back(trainer: pl.Trainer, ring: SnapshotRing) -> None:
    """Let parameters be shards, as they are copied.

    Raises:
        RuntimeError: If the Trainer has other optimizers than those whose state was copied.
    """
    if list(trainer.optimizers) != ring.optimizers:
        raise RuntimeError(
            f"training cannot go back: the Trainer has other optimizers ({', '.join(map(_kind, trainer.optimizers))}) "
            f"than when it started ({', '.join(map(_kind, ring.optimizers))}), whose states are in the snapshots"
        )
    reshard(trainer)


def _kind(thing: object) -> str:
    return type(thing).__name__


def reshard(trainer: pl.Trainer) -> None:
    """Let parameters be shards, where they are between steps."""
    if isinstance(trainer.strategy, MeshStrategy):
        trainer.strategy.parallelized.data.reshard()


def refuse(*problems: Iterable[Problem]) -> None:
    """Raise `ParallelConfigError` with all problems, if there is any."""
    found = Problems()
    for some in problems:
        found.extend(list(some))
    found.raise_if_any()


def guard_problems(make_guard: Callable[[StepControl], StepGuard]) -> list[Problem]:
    """Which of the numbers that a guard is given make no sense."""
    try:
        make_guard(StepControl())
    except ParallelConfigError as error:
        return list(error.problems)
    return []


def option_problems(every: int | None, keep: int, min_age: int | None, data: str) -> list[Problem]:
    """Which options of `NaNRewind` make no sense."""
    problems = Problems()
    for name, value in (("snapshot_every_n_steps", every), ("keep_snapshots", keep)):
        if value is not None and value < 1:
            problems.add(f"NaNRewind: {name} is {value}; it is at least 1", f"{name}=1")
    oldest = (keep - 1) * (every or 0)
    if every is not None and min_age is not None and not 0 <= min_age <= oldest:
        problems.add(
            f"NaNRewind: min_age is {min_age}, and the oldest of {keep} snapshots, one every {every} steps, may be "
            f"{oldest} steps old",
            f"keep_snapshots={1 + math.ceil(min_age / max(every, 1))}" if min_age > 0 else "min_age=0",
        )
    if data not in ("skip_past", "replay"):
        problems.add(f"NaNRewind: data is {data!r}; it is 'skip_past' or 'replay'", "data='skip_past'")
    return list(problems)


def strategy_problems(trainer: pl.Trainer, *, replay: bool) -> list[Problem]:
    """Why steps cannot be judged, or batches not come again, under a strategy."""
    strategy, problems = trainer.strategy, Problems()
    name = type(strategy).__name__
    if not isinstance(strategy, MeshStrategy | SingleDeviceStrategy | DDPStrategy):
        problems.add(f"NaNRewind cannot leave out a step of {name}, which steps by itself", 'strategy="par_fsdp"')
    if replay and not isinstance(strategy, MeshStrategy):
        problems.add(
            f"NaNRewind: data is 'replay', and under {name} loaders cannot go back; that needs a strategy of "
            "lightning_par, also on one device",
            "data='skip_past', or strategy='par_ddp'",
            "data: skip_past",
        )
    return list(problems)


def fit_problems(trainer: pl.Trainer, *, replay: bool) -> list[Problem]:
    """With which optimizers and loaders of a fit steps cannot be left out or come again."""
    problems = Problems()
    scaler = rewinding.scaler_of(trainer)
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            problems.add(
                f"NaNRewind cannot leave out a step of {name}: it runs a batch several times in one step",
                "leave NaNRewind out (lightning-par fit: --defaults.nan_rewind false)",
            )
        if (
            scaler is not None
            and not isinstance(trainer.strategy, MeshStrategy)
            and _compat_steps.takes_out_scale(optimizer)
        ):
            problems.add(
                f"NaNRewind cannot leave out a step of a fused {name} with the fp16 scaler that "
                f"{type(trainer.strategy).__name__} uses",
                "fused=False, precision='bf16-mixed', or strategy='par_ddp'",
            )
    if replay:
        problems.extend(rewinding.replay_problems(trainer))
    return list(problems)
