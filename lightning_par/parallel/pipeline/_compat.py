"""Everything private of `torch.distributed.pipelining` that the package uses, with what breaks when torch changes it.

Known for torch 2.13. The public part (`PipelineStage`, `get_schedule_class`, the constructors of schedules,
`step`) is used where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Step = tuple[str, int, int, bool]
"""The kind of a computation ("F", "B", "I" or "W"), its stage, its micro-batch, whether the next is to overlap it."""


# What a stage is told of the tensors that it receives and sends (newer than torch 2.11).
CAN_DESCRIBE_STAGES = hasattr(_utils, "_StageMeta")


def planned_steps(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int) -> dict[int, list[Step]]:
    """Construct a schedule without processes and return what it computes on each rank, in torch's own order.

    Reads `pipeline_order` (lists of `_Action`, None for an idle slot), and relies on the constructors asking of a stage
    no more than its numbers and its module. Without them there is no plan, and so no simulation; training is untouched.

    Raises:
        Exception: Whatever torch raises for sizes that it refuses.
    """
    stages: Any = [
        SimpleNamespace(
            num_stages=pp_size * stages_per_rank, group_size=pp_size, group_rank=0, stage_index=i, submod=None
        )
        for i in range(stages_per_rank)
    ]
    cls = schedules.get_schedule_class(name)
    schedule = cls(stages[0] if issubclass(cls, PipelineScheduleSingle) else stages, n_microbatches)
    return {rank: [step for slot in slots for step in _steps(slot)] for rank, slots in schedule.pipeline_order.items()}


def _steps(slot: Any) -> list[Step]:
    """The computations of one `_Action`; two for `OVERLAP_F_B`, none for an idle slot or `REDUCE_GRAD`."""
    if slot is None or slot.computation_type is schedules.REDUCE_GRAD:
        return []
    if slot.sub_actions is not None:
        parts = [step for part in slot.sub_actions for step in _steps(part)]
        return [(*step[:3], i < len(parts) - 1) for i, step in enumerate(parts)]
    return [(slot.computation_type.value, slot.stage_index, slot.microbatch_index, False)]


def schedule_stages(schedule: Schedule) -> list[PipelineStage]:
    """Return the stages that a schedule runs on this rank (`_stage` of single-stage schedules, `_stages` of others)."""
    if isinstance(schedule, PipelineScheduleSingle):
        return [cast(PipelineStage, schedule._stage)]
    return [cast(PipelineStage, stage) for stage in schedule._stages]


def has_loss(schedule: Schedule) -> bool:
    """Tell whether a schedule runs a backward (`_has_backward`, set by the constructor from its `loss_fn`)."""
    return schedule._has_backward


def release_outputs(schedule: Schedule) -> None:
    """Drop what the stages keep of a step (`clear_runtime_states`, which torch calls at the begin of the next one).

    After forwards alone every boundary tensor is still there; without this they stay in memory until the next step.
    """
    for stage in schedule_stages(schedule):
        stage.clear_runtime_states()


def forward_schedule(
    stages: Sequence[PipelineStage], n_microbatches: int, ranks: Mapping[int, int], held: Mapping[int, list[int]]
) -> PipelineScheduleMulti:
    """Build a schedule of forwards alone: on each rank all micro-batches of its first stage, then of the next.

    `_PipelineScheduleRuntime` runs any list of actions, but `_prepare_schedule_with_comms` demands backwards. So its
    other steps are taken here: `stage_index_to_group_rank` of the schedule and of each stage, `_add_unshard_reshard`
    (FSDP stages refuse to compute otherwise) and `_add_send_recv` (the order of p2p that cannot hang). If one of them
    changes, evaluation of pipelines breaks; training does not use them.

    Args:
        stages: The stages of this rank, ascending.
        n_microbatches: Number of micro-batches.
        ranks: Rank in the pipeline group of each stage.
        held: Stages of each rank, in the order in which they run.
    """
    schedule = schedules._PipelineScheduleRuntime(list(stages), n_microbatches)
    schedule.stage_index_to_group_rank = dict(ranks)
    for stage in stages:
        stage.stage_index_to_group_rank = dict(ranks)
    forwards = {
        rank: [schedules._Action(stage, schedules.FORWARD, i) for stage in mine for i in range(n_microbatches)]
        for rank, mine in held.items()
    }
    actions = {rank: schedules._add_unshard_reshard([*steps]) for rank, steps in forwards.items()}
    stage_to_rank: Callable[[int], int] = ranks.__getitem__
    schedule.pipeline_order_with_comms = schedules._add_send_recv(actions, stage_to_rank, len(ranks))
    return schedule
