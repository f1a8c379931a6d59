"""Where the memory of each rank goes, measured inside of real steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_par.errors import Problems, is_count
from lightning_par.parallel.accounting import PHASES, Phase, human
from lightning_par.parallel.memory import live_tensor_bytes, model_state_bytes
from lightning_par.resilience.gathering import gather_numbers
from lightning_par.strategies import _compat

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "peak")
MAX_RANK_LINES = 16  # ranks that the table lists one by one

Report = list[dict[Phase, dict[str, int]]]
"""For each rank and each moment of the step, bytes by kind."""


class MemoryMonitor(Callback):
    """Prints a table of the bytes of every rank, and logs the largest, in one optimizer step of every n.

    Bytes are taken at the end of each forward, the end of each backward and after the step, over all accumulation steps
    of it:

    - ``parameters``, ``gathered`` (unsharded copies), ``gradients``, ``optimizer``: see `model_state_bytes`;
    - ``activations``, at the end of the forward: what else is there and was not when the batch began (so the batch is
      no part of it);
    - ``peak``: on CUDA the most that the allocator has held since the process began or
      `torch.cuda.reset_peak_memory_stats` was called; elsewhere the largest sum of all these at one of the moments,
      which buffers of gradients under way may exceed in between.

    On CUDA sizes are those of the allocator; elsewhere tensors are counted, those that autograd saved among them. The
    first step is monitored too. The other steps cost nothing; a monitored one costs some walks over all Python objects
    and one small all-gather. Metrics (``memory/parameters``, ...) go to the loggers of the module, in bytes, as the
    largest of the ranks and moments.

    Args:
        every_n_steps: One optimizer step of so many is monitored.

    Attributes:
        report: What the last monitored step showed, the same on all ranks: for each rank, by moment and kind.

    Raises:
        ParallelConfigError: If `every_n_steps` is no positive int.

    Example (Lightning CLI)::

        trainer:
          callbacks:
            - class_path: lightning_par.callbacks.MemoryMonitor
              init_args: {every_n_steps: 500}
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not is_count(every_n_steps):
            problems = Problems()
            problems.add(f"every_n_steps of MemoryMonitor is {every_n_steps!r}; it is an int >= 1", "every_n_steps=100")
            problems.raise_if_any()
        self.every_n_steps = every_n_steps
        self.report: Report | None = None
        self._monitored: int | None = None
        self._active = False
        self._seen: dict[Phase, dict[str, int]] = {}
        self._before = 0
        self._saved: saved_tensors_hooks | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Monitor the first step of each run."""
        self._monitored = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin with the first accumulation step of a step that is due."""
        self._release()
        step, last = trainer.global_step, self._monitored
        # A step may count by more than one (several optimizers) and may go back (a rewind).
        if not self._active and (last is None or step // self.every_n_steps != last // self.every_n_steps):
            self._active, self._monitored, self._seen = True, step, {}
        if not self._active:
            return
        device = trainer.strategy.root_device
        self._before = _allocated(device) - sum(model_state_bytes(pl_module, trainer.optimizers).values())
        if device.type != "cuda":
            # What autograd saves is invisible to Python unless a hook has handled it.
            self._saved = saved_tensors_hooks(_same, _same)
            self._saved.__enter__()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Measure at the end of a forward."""
        self._measure(trainer, pl_module, "end of forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure at the end of a backward."""
        self._measure(trainer, pl_module, "end of backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after the step, and report."""
        # Automatic optimisation always steps in the end; by hand a step may be hidden from the Trainer.
        stepped = trainer.global_step != self._monitored or not pl_module.automatic_optimization
        if self._active and stepped:
            self._measure(trainer, pl_module, "after step")
            self._active = False
            self.report = _gather(self._seen, trainer.strategy.root_device)
            for logger in trainer.loggers:
                logger.log_metrics(_largest(self.report), step=_compat.logged_step(trainer))
            pl_module.print(f"memory in step {trainer.global_step}\n{table(self.report)}")
        self._release()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing behind when training stops inside of an accumulation window."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind: Lightning calls no end of training after an exception."""
        self._stop()

    def _measure(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        if not self._active:
            return
        device = trainer.strategy.root_device
        now = model_state_bytes(pl_module, trainer.optimizers)
        rest = max(0, _allocated(device) - sum(now.values()) - self._before)
        now["peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sum(now.values()) + rest
        now["activations"] = rest if phase == "end of forward" else 0
        seen = self._seen.setdefault(phase, dict.fromkeys(KINDS, 0))
        seen.update({kind: max(seen[kind], now[kind]) for kind in KINDS})

    def _release(self) -> None:
        if self._saved is not None:
            self._saved.__exit__()
            self._saved = None

    def _stop(self) -> None:
        self._release()
        self._active = False


def table(report: Report) -> str:
    """Write a report for people: the largest of the ranks by moment (and which rank), then what each rank had at most.

    Args:
        report: For each rank, by moment and kind, bytes.
    """
    rows: list[Sequence[str]] = [("largest of the ranks", *PHASES)]
    for kind in KINDS:
        cells = []
        for phase in PHASES:
            values = [rank[phase][kind] for rank in report]
            measured = kind != "activations" or phase == "end of forward"
            cells.append(f"{human(max(values))} (rank {values.index(max(values))})" if measured else "-")
        rows.append((kind, *cells))
    text = _aligned(rows)
    if 1 < len(report) <= MAX_RANK_LINES:
        lines: list[Sequence[str]] = [("rank", *KINDS)]
        for number, rank in enumerate(report):
            lines.append((str(number), *(human(max(seen[kind] for seen in rank.values())) for kind in KINDS)))
        text += "\n" + _aligned(lines)
    return text


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live_tensor_bytes()


def _gather(seen: Mapping[Phase, Mapping[str, int]], device: torch.device) -> Report:
    """Bring what each rank has seen to all of them, in one collective."""
    mine = [seen[p][k] if p in seen else 0 for p in PHASES for k in KINDS]
    reports: Report = []
    for rank in gather_numbers(mine, device):
        numbers = map(int, rank)
        reports.append({p: {k: next(numbers) for k in KINDS} for p in PHASES})
    return reports


def _largest(report: Report) -> dict[str, float]:
    return {f"memory/{kind}": float(max(seen[kind] for rank in report for seen in rank.values())) for kind in KINDS}


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
