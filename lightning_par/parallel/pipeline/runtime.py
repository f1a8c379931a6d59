"""Run the stages of a rank: a batch is cut into micro-batches, and each stage replays the step on each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel import _compat
from lightning_par.parallel.pipeline import checks, loss_weights
from lightning_par.parallel.pipeline._stage import Metas, ReplayStage, StepModule
from lightning_par.parallel.pipeline.batch import Batch, Results, Step, loss_of
from lightning_par.parallel.pipeline.microbatches import batch_size, sizes, split
from lightning_par.parallel.pipeline.replay import Dtypes, Meta, Replay, StageRun, has_nan, refuse_leak
from lightning_par.parallel.pipeline.schedules import build_forward_only, build_schedule, schedule_problems
from lightning_par.parallel.pipeline.schedules import run as run_schedule
from lightning_par.parallel.pipeline.shared import SharedParameters
from lightning_par.parallel.pipeline.split import Stage
from lightning_par.parallel.random import default_generator, random_state_kept
from lightning_par.parallel.tensor.examples import in_evaluation

if TYPE_CHECKING:
    from lightning_par.parallel.data import DataParallel

log = logging.getLogger(__name__)

# Which schedule with the same stages runs any number of micro-batches.
_PATIENT = {
    "1F1B": "GPipe",
    "Interleaved1F1B": "LoopedBFS",
    "InterleavedZeroBubble": "LoopedBFS",
    "DualPipeV": "ZBVZeroBubble",
}

# A step of one seed is followed by that of the next batch, whose seed is drawn anew.
_SEEDS = 2**31


class Pipeline:
    """The stages of this rank.

    Args:
        module: The root module, its absent parts freed.
        replay: Runs a step as a stage.
        stages: All stages of the pipeline.
        mine: Those of this rank.
        owners: For each stage its rank in `group`.
        group: The ranks of the pipeline.
        schedule: Name of the schedule.
        device: Where it runs.
        stream: Distinguishes the random numbers of data ranks inside blocks.
        microbatches: Of a batch; fewer where it has fewer samples.
        loss_weight: How losses of micro-batches are combined: "auto", "samples" or "sum".
        shared: Parameters of which other ranks have a copy.
    """

    def __init__(
        self,
        module: nn.Module,
        replay: Replay,
        stages: Sequence[Stage],
        mine: Sequence[int],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        schedule: str,
        device: torch.device,
        stream: int,
        microbatches: int,
        loss_weight: str,
        shared: SharedParameters,
    ) -> None:
        self.module = module
        self.replay = replay
        self.stages = stages
        self.mine = [stages[index] for index in mine]
        self.owners = owners
        self.group = group
        self.device = device
        self.stream = stream
        self.shared = shared
        self._schedule_name = schedule
        self._microbatches = microbatches
        self._loss_weight = loss_weight
        self._schedules: dict[tuple[bool, int], tuple[Any, list[ReplayStage]]] = {}
        self._metas: dict[Any, dict[int, tuple[Meta, ...]]] = {}
        self._dtypes: dict[str, Dtypes] = {}
        self._counted: dict[str, bool] = {}
        self._checked: set[str] = set()
        self._agreed: set[Any] = set()
        self._compared = 0
        self._batch: Batch | None = None
        self._calls = 0
        self._data: DataParallel | None = None
        replay.outside = self._outside

    def bind_to_root(self) -> str:
        """Give the root the method under which its stages run; FSDP2 must be told of it by the returned name."""
        self.module.__dict__[RUN] = MethodType(_run_stage, self.module)
        return RUN

    def start(self, data: DataParallel) -> None:
        """Stand between the modules and their callers; the last thing that is done to a module."""
        self._data = data
        if RUN not in self.module.__dict__:
            self.bind_to_root()
        self.replay.install()

    @staticmethod
    def plain_step(step: Callable[[Any], Any], kind: str) -> Step:
        """A step that does nothing but compute."""
        return Step(step, step, loss_of, kind)

    def block_names(self) -> list[tuple[str, ...]]:
        """Names of the blocks of each stage of this rank."""
        return [self.replay.chain.blocks[stage.begin : stage.end] for stage in self.mine]

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.mine[-1].is_last

    @property
    def last_rank(self) -> int:
        """The rank of the last stage in the world."""
        return dist.get_global_rank(self.group, self.owners[-1])

    def share(self, data: Any) -> Any:
        """Give every rank of the pipeline what the rank of the last stage has."""
        box = [data if self.has_last else None]
        dist.broadcast_object_list(box, self.last_rank, group=self.group, device=self._object_device())
        return box[0]

    def from_last(self, make: Callable[[], Any]) -> Any:
        """Give every rank of the pipeline what the rank of the last stage makes, on this rank's device.

        Raises:
            RuntimeError: On all ranks, if it fails.
        """
        made, failure = None, None
        if self.has_last:
            try:
                made = make()
            except Exception as error:  # the other ranks wait
                failure = error
        shared, failed = self.share((made, None if failure is None else _described(failure)))
        if failure is not None:
            raise failure
        if failed is not None:
            raise RuntimeError(f"what the last stage of the pipeline returned cannot be shared: {failed}")
        return made if self.has_last else _compat.map_tensors(lambda tensor: tensor.to(self.device), shared)

    def train(self, step: Step, batch: Any, scale: float = 1.0) -> Results:
        """Run forward and backward on a batch; gradients of this rank's parameters are added to their `grad`.

        Args:
            step: What is run on each micro-batch.
            batch: The batch, the same on all stages.
            scale: The loss is multiplied by it before backward.

        Raises:
            RuntimeError: If a step failed on any stage: on all ranks of the pipeline.
        """
        size = batch_size(batch)
        count = min(self._microbatches, size)
        if count > 1 and self._compared < checks.BATCHES:
            if not self._compared:
                checks.warn_of_statistics(self.module, count)
            # Only the first batches of a run are compared, and one that resumes has to draw as one that goes on.
            with random_state_kept():
                compared = self._check_weights(step, batch, count)
            self._compared += compared
        return self._run(Batch(step, split(batch, count), sizes(size, count), scale, train=True))

    @torch.no_grad()
    def evaluate(self, step: Step, batch: Any) -> Results:
        """Run the forward on a batch."""
        size = batch_size(batch)
        count = min(self._microbatches, size)
        return self._run(Batch(step, split(batch, count), sizes(size, count)))

    def _run(self, batch: Batch, check: bool = True) -> Results:
        self._batch = batch
        batch.check = check and batch.step.kind not in self._checked
        batch.results.sizes = list(batch.sizes)
        try:
            with self._random_numbers(batch):
                self._run_stages(batch)
        finally:
            self._batch = None
        self._agree_on_failure(batch)
        self._checked.add(batch.step.kind)
        return batch.results

    def _run_stages(self, batch: Batch) -> None:
        count = len(batch.parts)
        metas: list[dict[int, tuple[Meta, ...]]] = []
        with batch.failing():
            metas = [self._crossing(batch, index) for index in range(count)]
        keys = {batch.key(index) for index in range(count)}
        if not keys <= self._agreed:  # else nothing was run that could fail, on any stage
            self._agree_on_failure(batch)
            self._agreed |= keys
        if self.has_last:  # while the first micro-batch is on its way
            with batch.failing():
                batch.results.weights = self._weights(batch)
        schedule, stages = self._schedule(metas, train=batch.train)
        for stage in stages:
            stage.expect(self._metas_of(stage.stage_index, metas))
        assert self._data is not None
        with self._data.pipelined() if batch.train else nullcontext():
            run_schedule(schedule, (torch.zeros(count),), torch.zeros(count), mb_index=torch.arange(count))

    def _check_weights(self, step: Step, batch: Any, count: int) -> bool:
        """Compare the loss of a few samples in one piece with what their halves make of it, if they can be compared.

        In evaluation mode: dropout would make two runs differ. Few samples, because a whole batch in one piece may not
        fit into memory.
        """
        piece = split(batch, max(1, count // 2))[0]
        size = batch_size(piece)
        if size < 2:
            return True
        dry = replace(step, run=step.dry, kind=f"{step.kind} (compared)")

        def loss_in(parts: int) -> checks.Loss:
            with in_evaluation(self.module), torch.no_grad():
                results = self._run(Batch(dry, split(piece, parts), sizes(size, parts)), check=False)
            ordered = [results.outputs[index] for index in sorted(results.outputs)]
            loss: checks.Loss = self.from_last(
                lambda: checks.combined([step.loss(output) for output in ordered], results.weights)
            )
            return loss

        if not checks.refuse_other_loss(loss_in, size, self._loss_weight):
            return False
        if self._loss_weight != "auto" or self.from_last(lambda: self._counted[dry.kind]):
            # Where targets are counted, or the user knows, one comparison is enough.
            self._compared = checks.BATCHES
        elif not self._compared:
            checks.warn_of_samples()
        return True

    # -- one micro-batch on one stage ------------------------------------------------------------------------------

    def _forward(self, stage: Stage, index: int, received: tuple[Tensor, ...]) -> Any:
        batch = self._batch
        assert batch is not None
        if batch.failure is not None:
            return self._placeholder(stage, batch, index, received)
        run = self._new_run(stage, batch, index, received)
        user_step = batch.step.run if stage.is_last else batch.step.dry
        try:
            result = self._enter(run, lambda: user_step(batch.parts[index]))
            if not stage.is_last:
                self._refuse_other_shapes(stage, result, self._crossing(batch, index)[stage.end])
            # The loss of a micro-batch without targets is NaN, and is left out.
            if batch.check and not (stage.is_last and batch.results.weights[index] == 0):
                self._refuse_nan(stage, batch, run, result)
            if not stage.is_last:
                return result
            batch.results.outputs[index] = _compat.map_tensors(Tensor.detach, result)
            return self._loss(batch, result, index, received)
        except Exception as error:  # the user's own code: the other stages wait for this one
            batch.fail(error)
            return self._placeholder(stage, batch, index, received)

    def _fail(self, error: Exception) -> None:
        assert self._batch is not None
        self._batch.fail(error)

    def _enter(self, run: StageRun, step: Callable[[], Any]) -> Any:
        # FSDP2 prepares its root around the method that it knows, see `RUN`.
        return getattr(self.module, RUN)(self.replay, run, step)

    def _loss(self, batch: Batch, result: Any, index: int, received: tuple[Tensor, ...]) -> Tensor:
        if not batch.train:
            return torch.zeros((), device=self.device)
        loss = batch.step.loss(result)
        weight = batch.results.weights[index]
        kept = batch.results.loss
        if weight:
            part = loss.detach().sum() * weight
            batch.results.loss = part if kept is None else kept + part
            # Neither a view nor the user's own tensor: torch detaches it in place.
            return loss.sum() * (weight * batch.scale)
        return torch.stack([value.sum() * 0.0 for value in received if value.is_floating_point()]).sum()

    def _placeholder(self, stage: Stage, batch: Batch, index: int, received: tuple[Tensor, ...]) -> Any:
        """What keeps the schedule going after an error."""
        zero: Tensor | float = 0.0
        for value in received:
            if value.requires_grad:
                zero = zero + value.sum() * 0.0
        if stage.is_last:
            return torch.zeros((), device=self.device, requires_grad=batch.train) + zero
        made = []
        for meta in self._crossing(batch, index)[stage.end]:
            tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            made.append(tensor + zero if meta.dtype.is_floating_point else tensor)
        return tuple(made)

    def _refuse_other_shapes(self, stage: Stage, sent: Sequence[Tensor], expected: tuple[Meta, ...]) -> None:
        found = tuple(map(Meta.of, sent))
        if found != expected:
            raise RuntimeError(
                f"stage {stage.index} sends {found} where the next one expects {expected}: shapes inside the model "
                "depend on more than the shapes of the batch"
            )

    def _refuse_nan(self, stage: Stage, batch: Batch, run: StageRun, result: Any) -> None:
        """Refuse a stage that makes NaN in every micro-batch: those that come of a sample are in one."""
        if not any(map(has_nan, _compat.tensors_in(result))) or any(map(has_nan, run.received or ())):
            return
        batch.made_nan[stage.begin] += 1
        checked = sum(map(bool, batch.results.weights)) if stage.is_last else len(batch.parts)
        if batch.made_nan[stage.begin] == checked:
            raise refuse_leak(self.module, self.replay.chain.blocks[stage.begin])

    def _new_run(self, stage: Stage, batch: Batch, index: int, received: tuple[Tensor, ...]) -> StageRun:
        return StageRun(
            begin=stage.begin,
            end=len(self.replay.chain.blocks) if stage.is_last else stage.end,
            received=None if stage.is_first else received,
            dtypes=self._dtypes.get(batch.step.kind, {}),
            seed=(batch.seed + index) % _SEEDS,
            stream=self.stream,
            protected=_compat.tensors_in(batch.parts[index]),
            check=batch.check,
        )

    # -- random numbers --------------------------------------------------------------------------------------------

    @contextmanager
    def _random_numbers(self, batch: Batch) -> Iterator[None]:
        """Draw one seed, the same on all stages, and go on after it as if nothing else had been drawn."""
        generator = default_generator(torch.device("cpu"))
        batch.seed = int(torch.randint(_SEEDS, (), generator=generator))
        with random_state_kept():
            yield

    # -- failures --------------------------------------------------------------------------------------------------

    def _agree_on_failure(self, batch: Batch) -> None:
        """Raise on all stages what failed on one."""
        flag = torch.tensor(int(batch.failure is not None), device=self._object_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        if not flag.item():
            return
        failures: list[Any] = [None] * self.group.size()
        dist.all_gather_object(failures, None if batch.failure is None else _described(batch.failure), group=self.group)
        if batch.failure is not None:
            raise batch.failure
        rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure)
        raise RuntimeError(f"the step failed on rank {rank} of the pipeline: {failure}")

    # -- what crosses the cuts -------------------------------------------------------------------------------------

    def _crossing(self, batch: Batch, index: int) -> dict[int, tuple[Meta, ...]]:
        """Find shape and dtype of all tensors that cross the cuts around this rank's stages."""
        kind = batch.step.kind
        key = batch.key(index)
        if kind not in self._dtypes:
            self._learn(batch)
        if key not in self._metas:
            stage = Stage(0, 1, 0, max(s.begin if s.is_last else s.end for s in self.mine))
            run = self._new_run(stage, batch, index, ())
            run.end, run.outline = stage.end, True
            with torch.no_grad():
                self.replay.stage(run, lambda: batch.step.dry(batch.parts[index]))
            self._metas[key] = run.metas
        return self._metas[key]

    def _learn(self, batch: Batch) -> None:
        """Run the first micro-batch through the stages for the dtypes of what calls return: precision sets them."""
        kind = batch.step.kind
        known = self._dtypes.setdefault(kind, {})
        crossing: tuple[Meta, ...] = ()
        for stage in self.stages[:-1]:
            box: list[Any] = [None]
            if stage in self.mine:
                try:
                    box = [self._learn_stage(stage, batch, crossing)]
                except Exception as error:  # the user's own code: the other ranks wait for what is found
                    batch.fail(error)
            source = dist.get_global_rank(self.group, self.owners[stage.index])
            dist.broadcast_object_list(box, source, group=self.group, device=self._object_device())
            if box[0] is None:
                del self._dtypes[kind]
                raise batch.failure or RuntimeError(f"the step failed on stage {stage.index} of the pipeline")
            seen, crossing = box[0]
            known.update(seen)

    def _learn_stage(self, stage: Stage, batch: Batch, crossing: tuple[Meta, ...]) -> tuple[Dtypes, tuple[Meta, ...]]:
        received = tuple(torch.zeros(m.shape, dtype=m.dtype, device=self.device) for m in crossing)
        run = self._new_run(stage, batch, 0, received)
        with torch.no_grad():
            sent = self._enter(run, lambda: batch.step.dry(batch.parts[0]))
        return run.seen, tuple(map(Meta.of, sent))

    def _metas_of(self, index: int, metas: Sequence[dict[int, tuple[Meta, ...]]]) -> tuple[Metas, Metas]:
        stage = self.stages[index]
        before = [] if stage.is_first else [crossing[stage.begin] for crossing in metas]
        after = [] if stage.is_last else [crossing[stage.end] for crossing in metas]
        return before, after

    # -- schedules -------------------------------------------------------------------------------------------------

    def _schedule(self, metas: Sequence[dict[int, tuple[Meta, ...]]], *, train: bool) -> tuple[Any, list[ReplayStage]]:
        key = (train, len(metas))
        if key not in self._schedules:
            stages = [self._new_stage(stage, metas) for stage in self.mine]
            if train:
                schedule = build_schedule(self._schedule_for(len(metas)), stages, len(metas), _sum)
            else:
                schedule = build_forward_only(self._schedule_name, stages, len(metas))
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _schedule_for(self, microbatches: int) -> str:
        """The schedule of a batch: one with fewer samples than micro-batches may need a more patient one."""
        name = self._schedule_name
        refused = schedule_problems(name, self.group.size(), microbatches, len(self.mine))
        return _PATIENT[name] if refused else name

    def _new_stage(self, stage: Stage, metas: Sequence[dict[int, tuple[Meta, ...]]]) -> ReplayStage:
        module = StepModule(lambda index, received: self._forward(stage, index, received), self._fail, self.module)
        return ReplayStage(
            module, stage.index, stage.count, self.device, self.group, self._metas_of(stage.index, metas)
        )

    # -- loss weights ----------------------------------------------------------------------------------------------

    def _weights(self, batch: Batch) -> list[float]:
        """Weigh the losses of micro-batches, for which the targets are counted before the first backward."""
        counts: list[list[Any]] = [[] for _ in batch.parts]
        kind = batch.step.kind
        if self._loss_weight == "auto" and self._counted.get(kind, True):
            counts = [self._count_targets(batch, index) for index in range(len(batch.parts))]
            self._counted[kind] = any(counts)
        return loss_weights.combine(counts, batch.sizes, self._loss_weight)

    def _count_targets(self, batch: Batch, index: int) -> list[Any]:
        """Count the targets of the losses of a micro-batch, in a pass over the step in which no value is real."""

        def count(*, compact: bool) -> tuple[list[Any], bool]:
            run = self._new_run(self.stages[-1], batch, index, ())
            run.outline, run.compact = True, compact
            with torch.no_grad(), loss_weights.watch_targets(count_only=True) as seen:
                try:
                    self.replay.stage(run, partial(batch.step.dry, batch.parts[index]))
                except Exception as error:  # the user's own code, which may object to NaN
                    log.debug("no more targets are counted: %s", error)
                    return list(seen), False
            return list(seen), True

        counts, complete = count(compact=True)
        # What takes no memory cannot be written to.
        return counts if complete else count(compact=False)[0]

    # -- calls outside of steps ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _outside(self, call: Callable[[], Any]) -> Any:
        """Run a call of the whole model, which every rank makes, as a forward through all stages."""
        self._calls += 1
        kind = f"call {self._calls}"
        step = Step(lambda part: call(), lambda part: call(), _no_loss, kind)
        results = self._run(Batch(step, [()], [1]))
        # Its shapes are those of its arguments, which are not looked at.
        del self._dtypes[kind], self._metas[kind, ()]
        self._checked.discard(kind)
        self._agreed.discard((kind, ()))
        return self.share(results.outputs.get(0))

    def _object_device(self) -> torch.device:
        return _compat.collective_device(self.group, torch.device("cpu"))


# The method of the root under which a stage runs.
RUN = "_lightning_par_run_stage"


def _run_stage(module: nn.Module, replay: Replay, run: StageRun, step: Callable[[], Any]) -> Any:
    """Run a step as a stage: bound to the root module, where FSDP2 can stand around it."""
    return replay.stage(run, step)


def _sum(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def _no_loss(result: Any) -> Tensor:
    raise AssertionError("a call outside of a step has no loss")


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, ParallelConfigError) else f"{type(error).__name__}: {error}"
