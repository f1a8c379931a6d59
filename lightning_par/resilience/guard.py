"""Decides of each optimizer step whether it is taken, left out, or taken back with those before; alike on all ranks."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_par.errors import Problems
from lightning_par.parallel import _compat
from lightning_par.parallel.gradients import group_by_device_and_dtype
from lightning_par.parallel.shards import to_local
from lightning_par.resilience.control import StepControl
from lightning_par.resilience.spikes import SpikeRule

Rule = Literal["", "nonfinite", "spike", "parameters", "overflow", "known"]
# A loss scale below it means that gradients are not finite whatever they are scaled by.
MIN_SCALE = 1.0
_SIGN = 2**63
_LOWEST = -(2**63) + 1


class Action(StrEnum):
    """What is to be done with a step; each but the first leaves it out."""

    STEP = "step"
    SKIP = "skip"
    REWIND = "rewind"  # go back to a snapshot in memory
    RELOAD = "reload"  # go back to a checkpoint
    STOP = "stop"


@dataclass(frozen=True)
class Reading:
    """What one rank sees of a step before it is taken.

    Attributes:
        losses: The loss of each micro-batch of the accumulation window.
        norm: The 2-norm of the gradients of this rank; of shards, where it holds shards.
        corrupt: Whether a parameter or some optimizer state is not finite.
    """

    losses: tuple[float, ...]
    norm: float
    corrupt: bool = False

    @property
    def loss(self) -> float:
        """The mean of the losses."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else -math.inf


@dataclass(frozen=True)
class Verdict:
    """The same on all ranks.

    Attributes:
        action: What is to be done.
        rule: Why; empty for a step that is taken.
        what: What was out of order: ``"loss"``, ``"gradients"`` or ``"parameters"``.
        value: The largest of all ranks' values of it; NaN where it is not finite on some rank.
        limit: The largest value that would have been taken.
        new_level: Whether a step is taken because so many before it were left out as spikes.
    """

    action: Action = Action.STEP
    rule: Rule = ""
    what: str = ""
    value: float = math.nan
    limit: float = math.inf
    new_level: bool = False

    @property
    def taken(self) -> bool:
        """Whether the step is taken."""
        return self.action is Action.STEP


@torch.no_grad()
def read(losses: Sequence[Tensor], gradients: Iterable[Tensor], checked: Iterable[Tensor] = ()) -> Reading:
    """Read what a rank sees of a step; one host synchronisation where tensors are on an accelerator.

    Args:
        losses: Scalars, one of each micro-batch of the window.
        gradients: Those that the step would take, DTensors or plain.
        checked: Parameters and optimizer state whose values are looked at too.
    """
    norm, largest, *numbers = read_on_device(losses, gradients, checked).tolist()
    return Reading(tuple(numbers), norm, not math.isfinite(largest))


@torch.no_grad()
def read_on_device(losses: Sequence[Tensor], gradients: Iterable[Tensor], checked: Iterable[Tensor] = ()) -> Tensor:
    """As `read`, without waiting for the device.

    Returns:
        A vector of float64: the norm of the gradients, the largest absolute value of what is checked, and the losses.
    """
    norms = _norms(gradients, 2.0)
    largest = _norms(checked, math.inf)
    device = norms.device if norms.numel() or not losses else losses[0].device
    squares = norms.to(device).square().sum()
    worst = largest.to(device).amax() if largest.numel() else torch.zeros_like(squares)
    values = [to_local(loss.detach()).to(device, torch.float64).reshape(()) for loss in losses]
    return torch.stack([squares.sqrt(), worst, *values])


def _norms(tensors: Iterable[Tensor], order: float) -> Tensor:
    local = (values_of(tensor) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    groups = group_by_device_and_dtype(t for t in local if t.numel()).values()
    found = [torch.stack(_compat.foreach_norm(same_kind, order)).double() for same_kind in groups]
    return torch.cat([norms.to(found[0].device) for norms in found]) if found else torch.empty(0, dtype=torch.float64)


def values_of(tensor: Tensor) -> Tensor:
    """What a rank holds of a tensor: its shard, or the values of a sparse one."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else to_local(tensor)


@dataclass
class _Track:
    """What is known of the steps of one optimizer."""

    loss: SpikeRule | None
    norm: SpikeRule | None
    skips: int = 0  # left out one after the other
    spikes: int = 0  # as spikes, one after the other

    def rules(self) -> list[tuple[str, SpikeRule]]:
        return [(n, r) for n, r in (("loss", self.loss), ("gradients", self.norm)) if r is not None]

    def windows(self) -> dict[str, Any]:
        return {name: rule.state_dict() for name, rule in self.rules()}

    def load_windows(self, state: Mapping[str, Any]) -> None:
        for name, rule in self.rules():
            if name in state:
                rule.load_state_dict(state[name])


@dataclass
class Counters:
    """How a run went.

    Attributes:
        attempts: Steps that were judged; never goes back.
        accepted: Steps that what is trained now has taken; goes back with a rewind.
        skipped: Steps that were left out, those that a loss scale was too large for not among them.
        overflows: Steps that were left out because the loss scale was too large.
        rewinds: The attempt at which each rewind to memory began.
        reloads: Rewinds to a checkpoint.
    """

    attempts: int = 0
    accepted: int = 0
    skipped: int = 0
    overflows: int = 0
    rewinds: list[int] = field(default_factory=list)
    reloads: int = 0


class StepGuard:
    """Judges each optimizer step by what all ranks see of it.

    A step is left out if the loss of a micro-batch or the gradients are not finite on any rank, or if the largest of
    the ranks' losses or gradient norms is a spike. Too many steps left out in a row climb a ladder: back to a snapshot
    in memory, back to a checkpoint, stop. Makes one exchange of `StepControl` for each step.

    Args:
        control: By which the ranks agree.
        spikes: The rule for losses and gradient norms, of which copies are made; None for no rule.
        max_consecutive_skips: So many steps that are not finite in a row, the last one among them, are a reason to go
            back.
        spike_patience: So many spikes in a row are left out; what follows is a new level.
        on_new_level: ``"accept"`` it, or ``"rewind"``.
        max_total_skips: More steps left out in all are a reason to stop; None for any number.
        max_rewinds: How often to go back to memory within `rewind_window` steps.
        rewind_window: See `max_rewinds`.
        max_reloads: How often to go back to a checkpoint.
        check_parameters_every: Look at parameters and optimizer state too in one step of so many; None for never.

    Attributes:
        counters: How the run went.
        left_out: How many of the steps that led to what is trained now were left out; goes back with a rewind.
        can_rewind: Whether there is a snapshot to go back to.
        can_reload: Whether there is a checkpoint to go back to.

    Raises:
        ParallelConfigError: With all numbers that make no sense.

    Example::

        reading = read([loss], (p.grad for p in model.parameters() if p.grad is not None))
        if guard.judge(step, reading).taken:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    """

    def __init__(
        self,
        control: StepControl,
        *,
        spikes: SpikeRule | None = None,
        max_consecutive_skips: int = 3,
        spike_patience: int = 3,
        on_new_level: Literal["accept", "rewind"] = "accept",
        max_total_skips: int | None = None,
        max_rewinds: int = 2,
        rewind_window: int = 1000,
        max_reloads: int = 1,
        check_parameters_every: int | None = None,
    ) -> None:
        problems = Problems()
        counts = {
            "max_consecutive_skips": (max_consecutive_skips, 1),
            "spike_patience": (spike_patience, 0),
            "max_total_skips": (max_total_skips, 0),
            "max_rewinds": (max_rewinds, 0),
            "rewind_window": (rewind_window, 1),
            "max_reloads": (max_reloads, 0),
            "check_parameters_every": (check_parameters_every, 1),
        }
        for name, (value, least) in counts.items():
            if value is not None and (type(value) is not int or value < least):
                problems.add(f"{name} is {value!r}; it is an int >= {least}", f"{name}={max(least, 1)}")
        if on_new_level not in ("accept", "rewind"):
            problems.add(f"on_new_level is {on_new_level!r}; it is 'accept' or 'rewind'", "on_new_level='accept'")
        problems.raise_if_any()
        self.control = control
        self.counters = Counters()
        self.left_out = 0
        self.can_rewind = self.can_reload = False
        self.check_parameters_every = check_parameters_every
        self._spikes = spikes
        self._max_consecutive, self._patience, self._max_total = max_consecutive_skips, spike_patience, max_total_skips
        self._on_new_level = on_new_level
        self._max_rewinds, self._rewind_window, self._max_reloads = max_rewinds, rewind_window, max_reloads
        self._tracks: dict[int, _Track] = {}

    # -- decisions -------------------------------------------------------------------------------------------------

    @property
    def checks_parameters(self) -> bool:
        """Whether the next reading is to look at parameters and optimizer state too."""
        every = self.check_parameters_every
        return every is not None and self.counters.attempts % every == 0

    def judge(
        self,
        step: int,
        reading: Reading,
        *,
        optimizer: int = 0,
        scale: float | None = None,
        known_bad: bool = False,
    ) -> Verdict:
        """Decide about a step; collective over all ranks.

        Args:
            step: The number of the step, the same on all ranks.
            reading: What this rank sees.
            optimizer: Which of several optimizers takes the step; each has its own windows and counts.
            scale: By what an fp16 scaler has multiplied the loss: gradients that are not finite although all losses
                are mean that it is too large, which is no reason to go back.
            known_bad: Whether the step was left out before and its data have come again.
        """
        numbers = {
            "loss_bad": int(not all(map(math.isfinite, reading.losses))),
            "gradients_bad": int(not math.isfinite(reading.norm)),
            "corrupt": int(reading.corrupt),
            "known": int(known_bad),
            "loss": _ordered(reading.loss),
            "gradients": _ordered(reading.norm),
        }
        heard = self.control.exchange(step, **{f"guard_{name}": number for name, number in numbers.items()})
        told = {name: heard[f"guard_{name}"] for name in numbers}
        return self._count(self._decide(self._track(optimizer), told, scale))

    def judge_shared(self, loss_bad: bool, gradients_bad: bool, corrupt: bool) -> Verdict:
        """Decide about a step of which all ranks know the same already; no collective, and no spikes.

        Args:
            loss_bad: Whether a loss was not finite on any rank.
            gradients_bad: Whether the gradients were not.
            corrupt: Whether parameters or optimizer state were not.
        """
        told = {"loss_bad": loss_bad, "gradients_bad": gradients_bad, "corrupt": corrupt, "known": 0}
        return self._count(self._decide(self._track(0), told | {"loss": _LOWEST, "gradients": _LOWEST}, None))

    def _count(self, verdict: Verdict) -> Verdict:
        counters = self.counters
        counters.attempts += 1
        self.left_out += not verdict.taken
        if verdict.taken:
            counters.accepted += 1
        elif verdict.rule == "overflow":
            counters.overflows += 1
        elif verdict.rule != "known":
            counters.skipped += 1
        return verdict

    def _decide(self, track: _Track, told: Mapping[str, int], scale: float | None) -> Verdict:
        if told["corrupt"]:
            return Verdict(self._next_rung(), "parameters", "parameters")
        if told["known"]:
            return Verdict(Action.SKIP, "known")
        if told["gradients_bad"] and not told["loss_bad"] and scale is not None and scale >= MIN_SCALE:
            return Verdict(Action.SKIP, "overflow", "gradients")
        if told["loss_bad"] or told["gradients_bad"]:
            track.skips += 1
            track.spikes = 0
            return Verdict(self._left_out(track), "nonfinite", "loss" if told["loss_bad"] else "gradients")
        values = {"loss": _from_ordered(told["loss"]), "gradients": _from_ordered(told["gradients"])}
        for name, rule in track.rules():
            limit = rule.limit()
            if values[name] > limit:
                return self._spike(track, values, name, limit)
        self._take(track, values)
        return Verdict()

    def _spike(self, track: _Track, values: Mapping[str, float], what: str, limit: float) -> Verdict:
        if track.spikes >= self._patience:
            if self._on_new_level == "rewind":
                return Verdict(self._next_rung(), "spike", what, values[what], limit)
            for _, rule in track.rules():
                rule.restart()
            self._take(track, values)
            return Verdict(Action.STEP, "spike", what, values[what], limit, new_level=True)
        track.skips += 1
        track.spikes += 1
        return Verdict(self._if_not_too_many(Action.SKIP), "spike", what, values[what], limit)

    def _take(self, track: _Track, values: Mapping[str, float]) -> None:
        track.skips = track.spikes = 0
        for name, rule in track.rules():
            rule.accept(values[name])

    def _left_out(self, track: _Track) -> Action:
        too_many = track.skips >= self._max_consecutive
        return self._if_not_too_many(self._next_rung() if too_many else Action.SKIP)

    def _if_not_too_many(self, action: Action) -> Action:
        limit = self._max_total
        return Action.STOP if limit is not None and self.counters.skipped + 1 > limit else action

    def _next_rung(self) -> Action:
        counters = self.counters
        recent = [begun for begun in counters.rewinds if counters.attempts - begun < self._rewind_window]
        if self.can_rewind and len(recent) < self._max_rewinds:
            return Action.REWIND
        if self.can_reload and counters.reloads < self._max_reloads:
            return Action.RELOAD
        return Action.STOP

    def _track(self, optimizer: int) -> _Track:
        if optimizer not in self._tracks:
            self._tracks[optimizer] = _Track(copy.deepcopy(self._spikes), copy.deepcopy(self._spikes))
        return self._tracks[optimizer]

    # -- going back ------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """What goes back with a rewind: the windows and the numbers of steps that were accepted and left out."""
        windows = {number: track.windows() for number, track in self._tracks.items()}
        return {"accepted": self.counters.accepted, "left_out": self.left_out, "windows": windows}

    def gone_back(self, position: Mapping[str, Any], *, reloaded: bool) -> None:
        """Go on from a position, after a rewind.

        Args:
            position: What `position` gave.
            reloaded: Whether it was to a checkpoint, with which the ladder begins again.
        """
        self.counters.accepted, self.left_out = position["accepted"], position.get("left_out", 0)
        if reloaded:
            self.counters.reloads += 1
            self.counters.rewinds = []
        else:
            self.counters.rewinds.append(self.counters.attempts)
        self._load_windows(position["windows"])

    def _load_windows(self, windows: Mapping[int, Any]) -> None:
        for number in [*self._tracks, *windows]:
            track = self._track(number)
            track.skips = track.spikes = 0
            for _, rule in track.rules():
                rule.restart()
            track.load_windows(windows.get(number, {}))

    def state_dict(self) -> dict[str, Any]:
        """Everything by which the next decisions are made, as plain numbers; the same on all ranks."""
        streaks = {number: (track.skips, track.spikes) for number, track in self._tracks.items()}
        return {"counters": copy.deepcopy(vars(self.counters)), "streaks": streaks, **self.position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Decide from now on as the guard of `state_dict`."""
        self.counters, self.left_out = Counters(**copy.deepcopy(state["counters"])), state.get("left_out", 0)
        self._load_windows(state["windows"])
        for number, (skips, spikes) in state["streaks"].items():
            track = self._track(number)
            track.skips, track.spikes = skips, spikes


def _ordered(value: float) -> int:
    """Map a float to an int of 64 bits so that the larger float has the larger int; NaN comes lowest."""
    if math.isnan(value):
        return _LOWEST
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if bits >= 0 else -(bits + _SIGN)


def _from_ordered(number: int) -> float:
    """The inverse of `_ordered`."""
    if number == _LOWEST:
        return math.nan
    bits = number if number >= 0 else -number - _SIGN
    result: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return result
