"""How fast a run is, where the time of its steps goes, and what it started and ended with."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_par.callbacks._common import events_of, is_tried_out
from lightning_par.callbacks.rank_zero_logger import loss_of_batch
from lightning_par.callbacks.timed_steps import TimedSteps
from lightning_par.errors import Problems, is_number
from lightning_par.parallel._compat import tensors_in
from lightning_par.planner.flops import FlopCounter
from lightning_par.planner.hardware import peak_flops
from lightning_par.resilience.errors import DIVERGED, OF_ALL_RANKS, TrainingDivergedError
from lightning_par.resilience.events import FILE, EventLog
from lightning_par.resilience.failures import is_consequence
from lightning_par.resilience.step_timer import StepTimes
from lightning_par.resilience.throughput import Throughput, ThroughputReport
from lightning_par.strategies import MeshStrategy, _compat

# The first step of a start compiles, allocates and proves the layout; in the second one FLOPs are counted.
_COUNTED_STEP = 1
# Near a limit the phase to look at changes with each report; what stays for so many is told.
_STAYS = 3


class ThroughputMonitor(TimedSteps):
    """Measures tokens or samples per second, the split of the step time, TFLOP/s and MFU, and says what holds it up.

    Ranks of one model group (pipeline, tensor parallel) see the same samples, which count once. The first two steps of
    a start are left out: the first one warms up, and the second one is slower as its FLOPs are counted. Metrics
    ``throughput/...`` go to the loggers of the module, the rate and the MFU to its progress bar, and the same with the
    loss, the learning rate and the memory of each rank to ``events.jsonl`` in the Trainer's `default_root_dir`, for
    ``lightning-par report``. A step costs some marks in time; a report costs one small all-gather, and on CUDA one wait
    for the device. Works under any strategy.

    Args:
        every_n_steps: Report on so many optimizer steps.
        units: ``"tokens"``, ``"samples"``, or ``"auto"``: tokens where the batch is a mapping with ``input_ids``
            (all of them, padding too), else samples (the first size of its first tensor).
        count: How many units a batch of this rank has, where that is not the right number.
        flops: Whether FLOPs are counted, once.
        peak_tflops: Dense 1e12 FLOP/s of one device in the dtype of the run, where `planner.hardware` does not know it;
            without it there is no MFU then.

    Attributes:
        last: The last report, the same on all ranks.

    Raises:
        ParallelConfigError: With everything that is wrong with the arguments.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.ThroughputMonitor
              init_args: {every_n_steps: 20, units: tokens}
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        *,
        units: Literal["auto", "tokens", "samples"] = "auto",
        count: Callable[[Any], int] | None = None,
        flops: bool = True,
        peak_tflops: float | None = None,
    ) -> None:
        problems = Problems()
        super().__init__(every_n_steps, problems)
        if units not in ("auto", "tokens", "samples"):
            problems.add(
                f"units of ThroughputMonitor is {units!r}; it is 'auto', 'tokens' or 'samples'", 'units="auto"'
            )
        if count is not None and not callable(count):
            problems.add(f"count of ThroughputMonitor is {count!r}; it is a function of a batch", "count=len")
        if peak_tflops is not None and not (is_number(peak_tflops) and peak_tflops > 0):
            problems.add(f"peak_tflops of ThroughputMonitor is {peak_tflops!r}; it is above 0", "peak_tflops=312")
        problems.raise_if_any()
        self.last: ThroughputReport | None = None
        self._units = units
        self._of_batch = count
        self._count_flops = flops
        self._peak_tflops = peak_tflops
        self._events = EventLog(None)
        self._throughput = Throughput()
        self._flops: FlopCounter | None = None
        self._counting = False
        self._steps = self._in_step = 0
        self._known_units = self._warned = False
        self._told = ""
        self._bottlenecks: list[str] = []
        self._outputs: Any = None
        # When the parts of a start began, in seconds since the epoch: setup, loading, checks before training.
        self._began: dict[str, float] = {}
        self._open = self._keeps_events = False

    # -- begin and end -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note when the start began."""
        super().setup(trainer, pl_module, stage)
        self._began = {"init": time.time()}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is sharded, and a checkpoint is loaded now."""
        self._began["load"] = time.time()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It has been loaded."""
        self._began["check"] = time.time()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the timer, and note the start."""
        super().on_train_start(trainer, pl_module)
        data = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": trainer.global_rank}
        peak = None if self._peak_tflops is None else 1e12 * self._peak_tflops
        self._throughput = Throughput(
            data_rank=data["rank"], peak_flops=peak or _peak(trainer), device=trainer.strategy.root_device
        )
        self.last, self._told, self._bottlenecks = None, "", []
        self._known_units = self._warned = False
        self._steps = self._in_step = 0
        self._flops = None
        self._events = events_of(trainer)
        self._open, self._keeps_events = True, not is_tried_out(trainer)
        now = time.time()
        loading = self._began.get("load", now), self._began.get("check", now)
        self._events.write(
            "start",
            trainer.global_step,
            world_size=trainer.world_size,
            strategy=type(trainer.strategy).__name__,
            layout=_layout(trainer),
            host=socket.gethostname(),
            init_seconds=now - self._began.get("init", now) - (loading[1] - loading[0]),
            load_seconds=loading[1] - loading[0],
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on what is left, and say the last verdict."""
        if self._timer is not None and self._step != self._reported:
            self._timer.settle()
            self.report(trainer, pl_module, self._outputs)
        self._outputs = None
        if self.last is not None:
            rank_zero_info(f"ThroughputMonitor: {summary(self.last)}")
        self._stop_counting()
        super().on_train_end(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the end."""
        self._end("finished", 0, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note the end, and leave nothing behind."""
        self._stop_counting()
        super().on_exception(trainer, pl_module, exception)
        lines = str(exception).splitlines() or [""]
        how, follows = f"{type(exception).__name__}: {lines[0]}".rstrip(": "), is_consequence(exception)
        directory = Path(trainer.default_root_dir)
        # Of what ended the run rank 0 may only see that a rank is gone, unless all have ended it together. Where that
        # rank has another directory, it keeps to itself.
        alone = trainer.global_rank > 0 and not follows and not isinstance(exception, OF_ALL_RANKS)
        if self._open and self._keeps_events and alone and (directory / FILE).is_file():
            EventLog(directory).write("error", trainer.global_step, rank=trainer.global_rank, how=how)
        self._end(how, _status(exception), trainer.global_step, follows=follows)

    def _end(self, how: str, status: int, step: int, **facts: Any) -> None:
        if self._open:
            self._events.write("end", step, how=how, status=status, **facts)
        self._open = False

    # -- steps ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch, and in one step its FLOPs."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._count_units(batch)
        if self._count_flops and self._steps == _COUNTED_STEP:
            self._flops = self._flops or FlopCounter()
            self._flops.active = self._counting = True
            self._flops.__enter__()

    def _count_units(self, batch: Any) -> None:
        first, self._known_units = not self._known_units, True
        if first:
            self._throughput.units = self._units if self._units != "auto" else _units_of(batch)
        units = self._of_batch(batch) if self._of_batch else units_in(batch, self._throughput.units)
        self._in_step += units
        if first and not units:
            rank_zero_warn(
                f"ThroughputMonitor finds no tensor in a batch, which is a {type(batch).__name__}, so it reports 0 "
                f"{self._throughput.units}/s: ThroughputMonitor(count=lambda batch: ...) says how many it has"
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count none of the optimizer's own products of matrices."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._flops is not None:
            self._flops.active = not pl_module.automatic_optimization

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the count of FLOPs before other callbacks do something."""
        self._stop_counting()
        self._outputs = outputs
        stepped, counter = trainer.global_step != self._step, self._flops
        if stepped and counter is not None:
            self._flops = None
            self._throughput.calibrate(counter.model, counter.hardware, self._in_step)
        if stepped:
            if self._steps > _COUNTED_STEP:
                self._throughput.count(self._in_step)
            self._steps, self._in_step = self._steps + 1, 0
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def timed(self, times: StepTimes) -> None:
        """Add a step."""
        if times.index > _COUNTED_STEP:
            self._throughput.add(times)

    def report(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Tell loggers, progress bar and the events."""
        found = self._throughput.report(loss_of_batch(trainer, pl_module, outputs))
        if found is None:
            return
        if found.mfu is not None and found.mfu > 1:
            if not self._warned:
                rank_zero_warn(
                    f"ThroughputMonitor leaves out the MFU: it would be {100 * found.mfu:.0f} %, so the peak of the "
                    "device is another one (peak_tflops=...), or FLOPs are not those of most steps"
                )
            self._warned = True
            found = ThroughputReport(**{**vars(found), "mfu": None})
        self.last = found
        for logger in trainer.loggers:
            logger.log_metrics(found.metrics(), step=_compat.logged_step(trainer))
        shown = {f"{found.units}/s": found.per_second, "mfu": found.mfu}
        _compat.show_in_progress_bar(trainer, {name: value for name, value in shown.items() if value is not None})
        self._write(trainer, found)
        # What people should act on is said once, not at each report.
        self._bottlenecks = [*self._bottlenecks, found.bottleneck][-_STAYS:]
        stays = not self._told or self._bottlenecks == _STAYS * [found.bottleneck]
        if stays and found.bottleneck != self._told:
            self._told = found.bottleneck
            rank_zero_info(f"step {trainer.global_step}: {found.verdict}")

    def _write(self, trainer: Trainer, found: ThroughputReport) -> None:
        self._events.write(
            "step",
            trainer.global_step,
            loss=found.loss,
            steps=found.steps,
            step_seconds=found.step_seconds,
            split=dict(found.split),
            units=found.units,
            per_second=found.per_second,
            per_second_per_rank=found.per_second_per_rank,
            own_seconds=found.own_seconds,
            tflops=found.tflops,
            mfu=found.mfu,
            memory_bytes=found.memory_bytes,
            lr=float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None,
            verdict=found.verdict,
        )

    def _stop_counting(self) -> None:
        if self._flops is not None and self._counting:
            self._flops.__exit__(None, None, None)
        self._counting = False


def summary(found: ThroughputReport) -> str:
    """A report in one line."""
    parts = [f"{found.per_second:,.0f} {found.units}/s", f"{1e3 * found.step_seconds:.0f} ms a step"]
    if found.tflops is not None:
        parts.append(f"{found.tflops:.3g} TFLOP/s a rank")
    if found.mfu is not None:
        parts.append(f"MFU {100 * found.mfu:.1f} %")
    return f"{', '.join(parts)}; {found.verdict}"


def units_in(batch: Any, units: str) -> int:
    """How many tokens or samples a batch has."""
    if units == "tokens" and isinstance(batch, Mapping) and "input_ids" in batch:
        return int(batch["input_ids"].numel())
    tensors = tensors_in(batch)
    if not tensors:
        return 0
    if units == "tokens":
        return tensors[0].numel()
    return tensors[0].shape[0] if tensors[0].dim() else 1


def _units_of(batch: Any) -> str:
    return "tokens" if isinstance(batch, Mapping) and "input_ids" in batch else "samples"


def _peak(trainer: Trainer) -> float | None:
    device = trainer.strategy.root_device
    return peak_flops(torch.cuda.get_device_name(device), _dtype(trainer)) if device.type == "cuda" else None


def _dtype(trainer: Trainer) -> str:
    """The dtype of matrix products, as `planner.hardware` spells it."""
    strategy = trainer.strategy
    if isinstance(strategy, MeshStrategy):
        policy = strategy.policy
        dtype = policy.autocast or policy.param or policy.storage
    else:
        names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
        dtype = names.get(str(trainer.precision).split("-")[0], torch.float32)
    known = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    if dtype in known:
        return known[dtype]
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _layout(trainer: Trainer) -> str:
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        return f"{trainer.world_size} ranks"
    sizes = {name: getattr(strategy.layout, f"{name}_size") for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


def _status(exception: BaseException) -> int:
    """With which the process will end, if nobody catches the exception."""
    if isinstance(exception, SystemExit):
        return exception.code if isinstance(exception.code, int) else int(exception.code is not None)
    if isinstance(exception, TrainingDivergedError):
        return DIVERGED
    # After a KeyboardInterrupt, too: Lightning turns it into that status.
    return 1
