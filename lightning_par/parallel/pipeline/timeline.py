"""When each rank of a pipeline computes what: a simulation of a schedule, from the times of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_par.parallel.pipeline.schedules import Action

Times = float | Mapping[int, float]
"""Seconds of every stage, or of each."""


Result = tuple[str, int, int]
"""What an action makes: "F" an output or "I" a gradient of an input, of a stage and a micro-batch."""


class Timed(NamedTuple):
    """An action with its start and its end, in seconds from the begin of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what.

    Attributes:
        ranks: The actions of each rank, in order.
        step_time: Seconds until the last rank is done.
    """

    ranks: dict[int, list[Timed]]
    step_time: float

    @property
    def idle(self) -> dict[int, float]:
        """The share of the step in which a rank computes nothing, by rank."""
        return {
            rank: 1 - sum(timed.end - timed.start for timed in actions) / self.step_time
            for rank, actions in self.ranks.items()
        }

    @property
    def bubble(self) -> float:
        """The mean of the idle shares: of the whole step, not of the ideal time."""
        return sum(self.idle.values()) / len(self.ranks)

    @property
    def in_flight(self) -> dict[int, float]:
        """The most micro-batches whose activations a rank holds at once, by rank.

        One counts from its forward to the end of its backward (of the part for the weights where that is split: until
        then torch keeps the graph), and as 1 / v on each of the v stages of a rank.
        """
        peaks = {}
        for rank, actions in self.ranks.items():
            now = peak = 0
            for timed in actions:
                now += timed.action.kind == "F"
                peak = max(peak, now)
                now -= timed.action.kind in ("B", "W")
            peaks[rank] = peak / len({timed.action.stage for timed in actions})
        return peaks


def simulate(
    actions: Mapping[int, Sequence[Action]],
    forward: Times,
    input_gradient: Times,
    weight_gradient: Times,
    transfer: float = 0.0,
) -> Timeline:
    """Run a schedule on paper: each rank takes its actions in order, and each waits for what it needs.

    As in torch, `B` costs both parts of the backward, and stage 0 does nothing in `I` and everything in `W`: its own
    input needs no gradient, so there is nothing to send early.

    Args:
        actions: What each rank computes, in order, as `compute_actions` returns it.
        forward: Seconds of the forward of one micro-batch in a stage.
        input_gradient: Seconds of the gradients of its hidden states; those inside stage 0 too.
        weight_gradient: Seconds of the gradients of its weights.
        transfer: Seconds until what a rank sends is at the next; the ranks go on meanwhile.

    Raises:
        ValueError: The actions wait for each other.
    """
    rank_of = {action.stage: rank for rank, steps in actions.items() for action in steps}
    last_stage = max(rank_of)
    made: dict[Result, float] = {}  # when it is at hand on the rank that made it
    sent: dict[Result, float] = {}  # when it is at hand on others
    unsent: dict[int, list[Result]] = {rank: [] for rank in actions}
    done: dict[int, list[Timed]] = {rank: [] for rank in actions}
    while any(len(done[rank]) < len(steps) for rank, steps in actions.items()):
        before = sum(map(len, done.values()))
        for rank, steps in actions.items():
            for action in steps[len(done[rank]) :]:
                needs = _needs(action, last_stage)
                if not all(need in (made if rank_of[need[1]] == rank else sent) for need in needs):
                    break
                at_hand = [(made if rank_of[need[1]] == rank else sent)[need] for need in needs]
                start = max([*at_hand, done[rank][-1].end if done[rank] else 0.0])
                end = start + _seconds(action, forward, input_gradient, weight_gradient)
                done[rank].append(Timed(action, start, end))
                made[_result(action)] = end
                unsent[rank].append(_result(action))
                if not action.with_next:
                    sent |= dict.fromkeys(unsent[rank], end + transfer)
                    unsent[rank].clear()
        if before == sum(map(len, done.values())):
            waiting = {rank: steps[len(done[rank])] for rank, steps in actions.items() if len(done[rank]) < len(steps)}
            raise ValueError(f"the actions wait for each other: {waiting}")
    return Timeline(done, max(timed[-1].end for timed in done.values() if timed))


def _result(action: Action) -> Result:
    kind = {"B": "I"}.get(action.kind, action.kind)
    return kind, action.stage, action.microbatch


def _needs(action: Action, last_stage: int) -> list[Result]:
    """What must be there before an action can begin."""
    kind, stage, microbatch, _ = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, microbatch)]
    own = ("F", stage, microbatch)
    return [own] if stage == last_stage else [own, ("I", stage + 1, microbatch)]


def _seconds(action: Action, forward: Times, input_gradient: Times, weight_gradient: Times) -> float:
    def of(times: Times) -> float:
        return times[action.stage] if isinstance(times, Mapping) else times

    if action.kind == "F":
        return of(forward)
    whole = of(input_gradient) + of(weight_gradient)
    if action.kind == "B":
        return whole
    if action.stage == 0:
        return 0.0 if action.kind == "I" else whole
    return of(input_gradient) if action.kind == "I" else of(weight_gradient)


def bubble_formula(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int) -> float | None:
    """Return the closed form of `Timeline.bubble` for equal stages, equal times of `F`, `I` and `W`, and no transfer.

    It is a share of the whole step. Publications give the idle time over the ideal time m v (F + I + W), with p ranks,
    m micro-batches and v stages on each rank; with x for that, the share here is x / (1 + x).

    - GPipe, 1F1B: x = (p - 1) / m; Interleaved1F1B: x = (p - 1) / (v m) (Narayanan et al. 2021, arXiv:2104.04473,
      sections 2.2.1 and 2.2.2), which holds for the breadth-first order too (Lamy-Poirier 2022, arXiv:2211.05953).
    - InterleavedZeroBubble: idle (p - 1)(F + I - W) (ZB-H1 of Qi et al. 2024, arXiv:2401.10241), of one stage here.
    - ZBVZeroBubble: without a gap on any rank (ZB-V, ibid.); what is left is that rank r begins after r forwards.

    Returns:
        None where no closed form is exact: DualPipeV, whose published one takes overlapping for granted, and too few
        micro-batches to fill the pipeline.
    """
    p, m, v = pp_size, n_microbatches, stages_per_rank
    if name in ("GPipe", "1F1B"):
        return (p - 1) / (m + p - 1)
    if name in ("Interleaved1F1B", "LoopedBFS") and m >= p:
        return (p - 1) / (v * m + p - 1)
    if (name == "InterleavedZeroBubble" and m >= p) or (name == "ZBVZeroBubble" and m >= 2 * p - 1):
        return (p - 1) / (3 * v * m + p - 1)
    return None
