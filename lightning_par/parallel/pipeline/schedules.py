"""The pipeline schedules of torch: which there are, what they need, where their stages lie, and how they are run."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.parallel.pipeline import _compat
from lightning_par.parallel.pipeline._compat import Schedule

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]


class Action(NamedTuple):
    """One computation of a schedule.

    Attributes:
        kind: `F` forward, `B` whole backward, `I` gradient of the inputs, `W` gradient of the weights.
        stage: Index of the stage, over all ranks.
        microbatch: Index of the micro-batch.
        with_next: Whether torch sends what it makes only after the next action, as it does in overlapping pairs.
    """

    kind: Kind
    stage: int
    microbatch: int
    with_next: bool = False


@dataclass(frozen=True)
class ScheduleKind:
    """What a schedule of torch needs.

    Attributes:
        cls: The class in `torch.distributed.pipelining.schedules`.
        least_stages: Fewest stages of a rank.
        most_stages: Most stages of a rank, None for any number.
        placement: `loop`: rank r has stages r, r + pp, r + 2 pp, ...; `v`: r and 2 pp - 1 - r.
        splits_backward: Whether it computes the gradients of inputs and of weights apart, which compiled code cannot.
        full_pipeline: Whether there must be as many micro-batches as stages.
        in_rounds: Whether micro-batches must fill rounds, see `schedule_problems`.
    """

    cls: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]
    least_stages: int
    most_stages: int | None
    placement: Placement = "loop"
    splits_backward: bool = False
    full_pipeline: bool = False
    in_rounds: bool = False


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(ScheduleGPipe, 1, 1),
    "1F1B": ScheduleKind(Schedule1F1B, 1, 1, full_pipeline=True),
    "Interleaved1F1B": ScheduleKind(ScheduleInterleaved1F1B, 2, None, in_rounds=True),
    "LoopedBFS": ScheduleKind(ScheduleLoopedBFS, 2, None),
    "InterleavedZeroBubble": ScheduleKind(ScheduleInterleavedZeroBubble, 2, None, splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": ScheduleKind(ScheduleZBVZeroBubble, 2, 2, "v", splits_backward=True),
    "DualPipeV": ScheduleKind(ScheduleDualPipeV, 2, 2, "v", splits_backward=True, full_pipeline=True),
}


def default_stages_per_rank(name: str) -> int:
    """Return the fewest stages that a rank has in a schedule: 1, or 2 where stages are interleaved."""
    return SCHEDULES[name].least_stages


def schedule_problems(
    name: str, pp_size: int, n_microbatches: int, stages_per_rank: int, *, compile: bool = False
) -> list[Problem]:
    """List everything for which torch would refuse a schedule, or hang in it, each with its fix.

    Args:
        name: A name of `SCHEDULES`.
        pp_size: Number of ranks of the pipeline.
        n_microbatches: Micro-batches of a step.
        stages_per_rank: Stages that each rank holds.
        compile: Whether the stages are compiled.
    """
    problems = Problems()
    kind = SCHEDULES.get(name)
    if kind is None:
        near = _nearest(name)
        problems.add(f"pp_schedule is {name!r}, schedules are {', '.join(SCHEDULES)}", f'pp_schedule="{near}"')
        return list(problems)
    if pp_size < 1:
        problems.add(f"pp_size is {pp_size}, a pipeline has at least 1 rank", "pp_size=2")
    if n_microbatches < 1:
        enough = 2 * max(pp_size, 1)  # which every schedule can have
        problems.add(f"pp_microbatches is {n_microbatches}, there is at least 1", f"pp_microbatches={enough}")
    least, most = kind.least_stages, kind.most_stages
    if stages_per_rank < least or (most is not None and stages_per_rank > most):
        number = f"exactly {least}" if least == most else f"at least {least}"
        stages = "stage" if least == 1 else "stages"
        problems.add(
            f"pp_stages_per_rank is {stages_per_rank}, {name} has {number} {stages} on each rank",
            f"pp_stages_per_rank={least}",
        )
    if compile and kind.splits_backward:
        problems.add(
            f"{name} computes the gradients of inputs and weights apart, which compiled blocks cannot", "compile=False"
        )
    if not problems:
        _check_microbatches(problems, name, pp_size, n_microbatches, pp_size * stages_per_rank)
    return list(problems)


def _check_microbatches(problems: Problems, name: str, pp_size: int, n_microbatches: int, stages: int) -> None:
    kind = SCHEDULES[name]
    if kind.full_pipeline and n_microbatches < stages:
        problems.add(
            f"pp_microbatches is {n_microbatches}, {name} over {stages} stages needs at least {stages}",
            f"pp_microbatches={stages}",
        )
    if kind.in_rounds and not _fills_rounds(n_microbatches, pp_size):
        fewer, more = (
            next(n for n in numbers if _fills_rounds(n, pp_size))
            for numbers in (itertools.count(n_microbatches, -1), itertools.count(n_microbatches))
        )
        problems.add(
            f"pp_microbatches is {n_microbatches}, {name} over {pp_size} ranks cuts them into "
            f"{n_microbatches // pp_size} equal rounds: {fewer} and {more} can be cut so",
            f"pp_microbatches={more}",
        )


def _fills_rounds(n_microbatches: int, pp_size: int) -> bool:
    """Whether torch's interleaved schedules can run so many: one round for each time they fill the pipeline."""
    return n_microbatches % max(1, n_microbatches // pp_size) == 0


def _nearest(name: str) -> str:
    """The schedule whose name is most like a wrong one; capitals and a prefix "Schedule" do not count."""
    plain = {known.casefold(): known for known in SCHEDULES}
    wrong = name.casefold().removeprefix("schedule")
    near = [known for known in plain if wrong and known.startswith(wrong)]
    near += difflib.get_close_matches(wrong, plain, n=1, cutoff=0.5)
    return plain[near[0]] if near else "1F1B"


def stages_of_rank(name: str, pp_rank: int, pp_size: int, stages_per_rank: int) -> list[int]:
    """Return the stages that a rank holds, ascending.

    Args:
        name: A name of `SCHEDULES`.
        pp_rank: The rank in the pipeline, 0 to `pp_size` - 1.
        pp_size: Number of ranks of the pipeline.
        stages_per_rank: Stages that each rank holds.
    """
    if SCHEDULES[name].placement == "v":
        return [pp_rank, 2 * pp_size - 1 - pp_rank]
    return [pp_rank + i * pp_size for i in range(stages_per_rank)]


def compute_actions(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int) -> dict[int, list[Action]]:
    """Return what each rank computes in a step, in order; no process group is needed.

    The order is torch's own. Where a forward and a backward shall overlap (DualPipeV), torch runs one after the other
    unless it is taught better, and so they stand here, the first one marked `with_next`.

    Args:
        name: A name of `SCHEDULES`.
        pp_size: Number of ranks of the pipeline.
        n_microbatches: Micro-batches of a step.
        stages_per_rank: Stages that each rank holds.

    Raises:
        ParallelConfigError: For sizes that `schedule_problems` refuses.
    """
    problems = schedule_problems(name, pp_size, n_microbatches, stages_per_rank)
    if problems:
        raise ParallelConfigError(*problems)
    planned = _compat.planned_steps(name, pp_size, n_microbatches, stages_per_rank)
    actions = {rank: [Action(cast(Kind, step[0]), *step[1:]) for step in steps] for rank, steps in planned.items()}
    # torch's plan of 1F1B, which it only shows and does not run, numbers the forwards of the last rank from 1.
    return {rank: _renumbered(steps) if name == "1F1B" else steps for rank, steps in actions.items()}


def _renumbered(actions: list[Action]) -> list[Action]:
    """Number the forwards and the backwards of a single stage in the order in which they come."""
    count = {"F": 0, "B": 0}
    renumbered = []
    for action in actions:
        renumbered.append(action._replace(microbatch=count[action.kind]))
        count[action.kind] += 1
    return renumbered


def build_schedule(
    name: str, stages: Sequence[PipelineStage], n_microbatches: int, loss_fn: Callable[[Any, Any], Tensor]
) -> Schedule:
    """Build the training schedule of this rank.

    Gradients are not divided by the number of micro-batches: a step gives the gradient of the sum of their losses.

    Stages must be made so that torch neither hangs nor drops a gradient:

    - `input_args` and `output_args` of every stage, tensors on meta are enough: then the first step runs nothing twice.
      Floating-point tensors that cross require a gradient in them, on both sides, also where a frozen stage makes them:
      behind inputs without, a split backward drops the gradients of the whole stage. Outputs that are declared without
      one must have none.
    - No output of a stage and no loss is a view where the backward is split (`clone` it): torch detaches it in place.
    - A stage's module lists every parameter that it uses, and each acts on an output only together with an input of the
      stage (any will do in the first stage): a split backward does not see others. It does not find shards either, so
      FSDP2 units are told here to stay gathered after their forward.
    - FSDP2 turns what comes into a unit into views: what is handed on as it came must be cloned, see above.

    Args:
        name: A name of `SCHEDULES`.
        stages: The stages of this rank, ascending, as `stages_of_rank` lists them.
        n_microbatches: Micro-batches of a step.
        loss_fn: Makes a scalar loss of the last stage's output and the target of a micro-batch.

    Raises:
        ParallelConfigError: For sizes that `schedule_problems` refuses.
    """
    problems = schedule_problems(name, stages[0].group_size, n_microbatches, len(stages))
    if problems:
        raise ParallelConfigError(*problems)
    if SCHEDULES[name].splits_backward:
        for unit in (module for stage in stages for module in stage.submod.modules() if isinstance(module, FSDPModule)):
            unit.set_reshard_after_forward(False, recurse=False)
    cls = SCHEDULES[name].cls
    if issubclass(cls, PipelineScheduleSingle):
        return cls(stages[0], n_microbatches, loss_fn=loss_fn, scale_grads=False)
    return cls(list(stages), n_microbatches, loss_fn=loss_fn, scale_grads=False)


def build_forward_only(name: str, stages: Sequence[PipelineStage], n_microbatches: int) -> Schedule:
    """Build forwards alone for stages that lie as a schedule wants them, for any number of micro-batches.

    Each rank runs its stages in order, all micro-batches of one and then of the next. torch's own `eval` cannot serve:
    it keeps the minimum of micro-batches and the divisibility of training, and fails where the stages lie in a V.

    Args:
        name: A name of `SCHEDULES`: it tells where the stages lie.
        stages: The stages of this rank, ascending, as `stages_of_rank` lists them. Not those of a training schedule: a
            schedule makes the buffers of a stage for its own number and shape of micro-batches.
        n_microbatches: Micro-batches of a step.
    """
    pp_size = stages[0].group_size
    held = {rank: stages_of_rank(name, rank, pp_size, len(stages)) for rank in range(pp_size)}
    ranks = {stage: rank for rank, mine in held.items() for stage in mine}
    return _compat.forward_schedule(stages, n_microbatches, ranks, held)


def run(
    schedule: Schedule,
    args: tuple[Tensor, ...] = (),
    target: Tensor | None = None,
    *,
    losses: list[Tensor] | None = None,
    return_outputs: bool = False,
    **kwargs: Any,
) -> Any:
    """Run one step of a schedule of `build_schedule` or `build_forward_only`; every rank of the pipeline calls it.

    All tensors are cut along dimension 0 into the micro-batches of the schedule, and must have at least as many rows.

    Args:
        schedule: The schedule of this rank.
        args: Inputs of the first stage; ignored on other ranks.
        target: What `loss_fn` gets as target; needed for training on the rank of the last stage, ignored on others.
        losses: Emptied and filled with the loss of each micro-batch, on the rank of the last stage.
        return_outputs: Whether to keep and join the outputs of the last stage.
        kwargs: Keyword arguments of every stage of this rank.

    Returns:
        The outputs of the last stage along dimension 0, if `return_outputs`, on its rank; else None.
    """
    stages = _compat.schedule_stages(schedule)
    if not any(stage.is_first for stage in stages):
        args = ()
    if not any(stage.is_last for stage in stages):
        target = None
    if _compat.has_loss(schedule):
        return schedule.step(*args, target=target, losses=losses, return_outputs=return_outputs, **kwargs)
    try:
        with torch.no_grad():
            return schedule.step(*args, return_outputs=return_outputs, **kwargs)
    finally:
        _compat.release_outputs(schedule)
