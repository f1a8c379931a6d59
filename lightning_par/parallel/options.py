"""How a layout is applied: the options that both shells and `parallelize` take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from lightning_par.errors import Problem, Problems
from lightning_par.layout import ParallelLayout
from lightning_par.parallel import capabilities
from lightning_par.parallel.memory import ActivationCheckpointing, checkpointing_problems
from lightning_par.parallel.precision import PrecisionPolicy

if TYPE_CHECKING:
    from lightning_par.parallel.pipeline.loss_weights import LossWeight
    from lightning_par.parallel.pipeline.split import Split
    from lightning_par.parallel.tensor import TensorPlanOption

Blocks = str | type[nn.Module] | Sequence[str | type[nn.Module]]
Checkpointing = bool | str | int | ActivationCheckpointing | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class ParallelOptions:
    """How to apply a layout; the strategies take the same options under the same names.

    Args:
        zero_stage: 1 (optimizer state), 2 (and gradients), 3 (and parameters) sharded over the `fsdp` ranks.
        blocks: The repeated blocks: "auto", or classes, class names or globs of names.
        reshard_after_forward: Overrides the stage's choice; an int re-shards over that many ranks.
        activation_checkpointing: None, "full", "selective", every n-th block (int), `ActivationCheckpointing`, or a
            function of name and block.
        compile: Compile each block; a string names the backend.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        sync_every_batch: Reduce gradients in each accumulation step; "auto": for ZeRO-2, ZeRO-3 and HSDP.
        tp_plan: How Linears are divided over the tp ranks: "auto", or styles by globs of names, or a function of the
            model that returns such (see `tensor.STYLES`). What no glob names is found out.
        sequence_parallel: Cut the sequence over the tp ranks inside the blocks.
        loss_parallel: "auto" leaves logits divided over the vocabulary where the loss can be computed so; False gathers
            them.
        pp_schedule: Schedule of the pipeline, by torch's name.
        pp_microbatches: Micro-batches of a batch; None for two a rank of the pipeline.
        pp_stages_per_rank: Stages of each rank; None for the fewest of the schedule.
        pp_split: "auto", or the number of blocks of each stage, or the name of the first block of each but the first.
        pp_loss_weight: How the losses of micro-batches make that of the batch: "auto" by the targets counted in cross
            entropies, "samples", or "sum" where the step returns a sum.
        verify: "auto" trusts a tensor-parallel plan that was verified before with the same code; "always" does it anew.
    """

    zero_stage: int = 3
    blocks: Blocks = "auto"
    reshard_after_forward: bool | int | None = None
    activation_checkpointing: Checkpointing = None
    compile: bool | str = False
    cpu_offload: bool = False
    sync_every_batch: bool | Literal["auto"] = "auto"
    tp_plan: TensorPlanOption = "auto"
    sequence_parallel: bool = False
    loss_parallel: Literal["auto", False] = "auto"
    pp_schedule: str = "1F1B"
    pp_microbatches: int | None = None
    pp_stages_per_rank: int | None = None
    pp_split: Split = "auto"
    pp_loss_weight: LossWeight = "auto"
    verify: Literal["auto", "always"] = "auto"

    def microbatches(self, pp_size: int) -> int:
        """The number of micro-batches of a batch."""
        return self.pp_microbatches or 2 * pp_size

    def stages_per_rank(self) -> int:
        """The number of pipeline stages of each rank."""
        from lightning_par.parallel.pipeline.schedules import default_stages_per_rank

        return self.pp_stages_per_rank or default_stages_per_rank(self.pp_schedule)

    def features(self, layout: ParallelLayout, policy: PrecisionPolicy) -> set[str]:
        """Name what is used, in the words of `capabilities.FEATURES`."""
        sizes = {"tp": layout.tp_size, "cp": layout.cp_size, "pp": layout.pp_size, "ep": layout.ep_size}
        used = {axis for axis, size in sizes.items() if size != 1}
        used.add("ddp" if layout.dp_shard_size == 1 else f"zero{self.zero_stage}")
        if layout.dp_shard_size != 1 and layout.dp_replicate_size != 1:
            used.add("hsdp")
        if policy.scaler:
            used.add("16-mixed")
        if self.activation_checkpointing not in (None, False):
            used.add("activation checkpointing")
        if self.compile:
            used.add("compile")
        if self.cpu_offload:
            used.add("cpu offload")
        if self.sequence_parallel:
            used.add("sequence parallel")
        return used

    def problems(self, layout: ParallelLayout, policy: PrecisionPolicy) -> list[Problem]:
        """List what is wrong with these options under a layout (as requested: a -1 may still be in it)."""
        problems = Problems()
        if self.zero_stage not in (1, 2, 3) or isinstance(self.zero_stage, bool):
            problems.add(f"zero_stage is {self.zero_stage!r}; the stages are 1, 2 and 3", "zero_stage=3")
            # The rest is checked as the fix would have it.
            return [*problems, *replace(self, zero_stage=3).problems(layout, policy)]
        if self.sync_every_batch not in (True, False, "auto"):
            problems.add(
                f"sync_every_batch is {self.sync_every_batch!r}; it is True, False or 'auto'", "sync_every_batch='auto'"
            )
        if self.loss_parallel not in ("auto", False):
            problems.add(f"loss_parallel is {self.loss_parallel!r}; it is 'auto' or False", "loss_parallel='auto'")
        if self.verify not in ("auto", "always"):
            problems.add(f"verify is {self.verify!r}; it is 'auto' or 'always'", "verify='auto'")
        if layout.tp_size == 1 and self.sequence_parallel:
            problems.add("sequence_parallel cuts the sequence over tp ranks, and tp_size is 1", "tp_size=2")
        if layout.tp_size == 1 and self.tp_plan != "auto":
            problems.add("tp_plan says how to divide over tp ranks, and tp_size is 1", "tp_size=2")
        reshard = self.reshard_after_forward
        if self.zero_stage < 3 and reshard:
            problems.add(
                f"reshard_after_forward={reshard!r} frees the gathered parameters that ZeRO-{self.zero_stage} keeps",
                "zero_stage=3",
            )
        if layout.dp_shard_size == 1 and reshard is not None:
            problems.add("reshard_after_forward has no meaning where nothing is sharded", "reshard_after_forward=None")
        if not isinstance(reshard, bool | None) and reshard < 2:
            problems.add(
                f"reshard_after_forward={reshard} is no number of ranks to re-shard over", "reshard_after_forward=True"
            )
        if layout.pp_size != 1:
            problems.extend(self._pipeline_problems(layout.pp_size))
        elif (self.pp_microbatches, self.pp_stages_per_rank, self.pp_split) != (None, None, "auto"):
            problems.add(
                "pp_microbatches, pp_stages_per_rank and pp_split divide a pipeline, and pp_size is 1", "pp_size=2"
            )
        problems.extend(checkpointing_problems(self.activation_checkpointing))
        problems.extend(capabilities.problems_of(self.features(layout, policy)))
        problems.extend(_torch_problems(layout))
        return list(problems)

    def _pipeline_problems(self, pp_size: int) -> list[Problem]:
        # torch's pipelines take long to import, and few runs need them.
        from lightning_par.parallel.pipeline.loss_weights import LossWeight
        from lightning_par.parallel.pipeline.schedules import SCHEDULES, default_stages_per_rank, schedule_problems

        problems = Problems()
        known = SCHEDULES.get(self.pp_schedule)
        if known is not None and known.splits_backward and self.reshard_after_forward:
            problems.add(
                f"{self.pp_schedule} computes the gradients of weights apart, for which they must stay gathered, and "
                f"reshard_after_forward={self.reshard_after_forward!r} frees them",
                "reshard_after_forward=False",
            )
        if self.pp_loss_weight not in get_args(LossWeight):
            problems.add(
                f"pp_loss_weight is {self.pp_loss_weight!r}; it is 'auto', 'samples' or 'sum'", "pp_loss_weight='auto'"
            )
        numbers = {"pp_microbatches": self.pp_microbatches, "pp_stages_per_rank": self.pp_stages_per_rank}
        wrong = [name for name, n in numbers.items() if n is not None and (not isinstance(n, int) or n < 1)]
        for name in wrong:
            problems.add(f"{name} is {numbers[name]!r}; it is a positive number or None", f"{name}=None")
        if not wrong:
            stages = self.pp_stages_per_rank or (default_stages_per_rank(self.pp_schedule) if known else 1)
            # A size of -1 is filled in later; what depends on it is checked then.
            size = max(pp_size, 1)
            problems.extend(
                schedule_problems(self.pp_schedule, size, self.microbatches(size), stages, compile=bool(self.compile))
            )
        return list(problems)


def _torch_problems(layout: ParallelLayout) -> list[Problem]:
    """Which axes need a newer torch than there is."""
    problems, fix = Problems(), 'pip install "torch>=2.12"'
    if layout.tp_size != 1:
        from lightning_par.parallel.tensor._compat import CAN_SIMULATE

        if not CAN_SIMULATE:
            problems.add(
                f"tp_size is {layout.tp_size}: a plan is verified on simulated ranks, which torch {torch.__version__} "
                "does not have",
                fix,
            )
    if layout.pp_size != 1:
        from lightning_par.parallel.pipeline._compat import CAN_DESCRIBE_STAGES

        if not CAN_DESCRIBE_STAGES:
            problems.add(
                f"pp_size is {layout.pp_size}: torch {torch.__version__} cannot be told what crosses the cuts", fix
            )
    return list(problems)
