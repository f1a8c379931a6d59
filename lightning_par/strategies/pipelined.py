"""The steps of a LightningModule under a pipeline, and its gradients where Lightning expects them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_par.parallel.pipeline.batch import Results, Step, loss_of
from lightning_par.parallel.pipeline.runtime import Pipeline
from lightning_par.strategies.step_records import (
    MergedStep,
    StepRecord,
    discarding,
    emit,
    merge_records,
    recording,
    share_metrics,
)


class PipelinedSteps:
    """Runs the steps of a module through a pipeline.

    Args:
        pipeline: Has the stages of this rank.
        module: The module.
        around: What a step runs in, such as autocast.
    """

    def __init__(
        self, pipeline: Pipeline, module: pl.LightningModule, around: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self._pipeline = pipeline
        self._module = module
        self._around = around
        self._stashed: list[tuple[nn.Parameter, Tensor | None]] = []
        self._looked_at: set[str] = set()
        self.undo = share_metrics(module, pipeline.share)

    def train(self, scale: float, batch: Any, *indices: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a batch.

        Args:
            scale: Of the loss, for backward.
            batch: The batch.
            indices: What else the step takes.
            kwargs: And by name.

        Returns:
            What one `training_step` on the batch would have returned, on all stages; its loss has no graph.
        """
        records: list[StepRecord] = []
        step = self._step("training_step", records, indices, kwargs)
        return self._finish(self._pipeline.train(step, batch, scale), records, is_shared=True)

    def evaluate(self, name: str, is_shared: bool, batch: Any, *indices: Any, **kwargs: Any) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on a batch.

        Args:
            name: Of the step.
            is_shared: Whether all stages need what it returns, or the last one only.
            batch: The batch.
            indices: What else the step takes.
            kwargs: And by name.
        """
        records: list[StepRecord] = []
        step = self._step(name, records, indices, kwargs)
        return self._finish(self._pipeline.evaluate(step, batch), records, is_shared=is_shared)

    def _step(self, name: str, records: list[StepRecord], indices: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        method = getattr(self._module, name)

        def run(part: Any) -> Any:
            with recording(self._module, records) as record, self._around(name):
                result = method(part, *indices, **kwargs)
            record.loss = loss_of(result).detach() if name == "training_step" else None
            records.append(record)
            return result

        def dry(part: Any) -> Any:
            with discarding(self._module), self._around(name):
                return method(part, *indices, **kwargs)

        return Step(run, dry, loss_of, name)

    def _finish(self, results: Results, records: list[StepRecord], *, is_shared: bool) -> Any:
        def make() -> Any:
            merged = merge_records(self._module, records, results.weights, results.sizes)
            self._warn_of_nan(merged)
            return merged, results.output() if is_shared else None

        merged, output = self._pipeline.from_last(make)
        emit(self._module, merged)
        return results.output() if self._pipeline.has_last and not is_shared else output

    def _warn_of_nan(self, merged: MergedStep) -> None:
        """Warn of a value that is logged and that another stage has computed."""
        for logged in merged.logs:
            value = logged.value
            if logged.name not in self._looked_at and isinstance(value, Tensor | float) and value != value:
                warnings.warn(
                    f"{logged.name!r} is logged as NaN. If it is computed from something between the embedding and the "
                    "last block, another stage of the pipeline has that: log what the model returns, or its loss",
                    stacklevel=2,
                )
            self._looked_at.add(logged.name)

    # -- gradients -------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Set gradients to None, as Lightning would do after the step."""
        for param in self._optimized():
            param.grad = None

    def stash_gradients(self) -> None:
        """Put gradients aside: Lightning sets them to None between the step and what it takes for the backward."""
        self._stashed = [(param, param.grad) for param in self._optimized()]
        self.forget_gradients()

    def _optimized(self) -> list[nn.Parameter]:
        """Not those of the module: while they are gathered these have no gradient that was reduced to a shard."""
        optimizers = self._module.trainer.optimizers
        return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]

    def restore_gradients(self) -> None:
        """Put the gradients back, where there are any aside."""
        for param, gradient in self._stashed:
            param.grad = gradient
        self._stashed = []
