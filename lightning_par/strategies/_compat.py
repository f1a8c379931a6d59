"""Every private Lightning API that the strategies use, in one place; `tests/test_compat.py` tells what breaks."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import wrappers as fabric_wrappers
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import grads, rank_zero
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.parallel.shards import full_tensor


def all_gather(tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
    """Gather over a group, differentiable with `sync_grads` (lightning >= 2.0)."""
    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def workers_are_seeded(dataloader: DataLoader[Any]) -> bool:
    """Whether Lightning seeds the workers of this loader (`seed_everything(workers=True)`), by the global rank.

    The Trainer asks before it adds its own function and respects one that is there; Fabric has added it already, as a
    `partial` of `pl_worker_init_function`.
    """
    if not int(os.environ.get("PL_SEED_WORKERS", 0)):
        return False
    current = dataloader.worker_init_fn
    return current is None or getattr(getattr(current, "func", None), "__name__", "") == "pl_worker_init_function"


def evaluation_without_inference_mode(trainer: Any) -> None:
    """Let validate, test and predict run under `no_grad`: FSDP2 cannot gather into inference tensors.

    Lightning does this for its own `FSDPStrategy` class only (`pytorch/loops/utilities.py`, lightning 2.6).
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def is_interrupted(trainer: Any) -> bool:
    """Whether the Trainer is handling an exception on this rank (`TrainerStatus.INTERRUPTED`, lightning >= 2.0)."""
    return bool(trainer.state.status == TrainerStatus.INTERRUPTED)


def requested_weights_only() -> bool | None:
    """Find the `weights_only` that was given to `Trainer.fit`, `validate`, `test` or `predict`, which is running now.

    `Trainer._run` does not hand it to a strategy that restores after its setup (lightning 2.6).
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer._run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weights_only")


def stage_of_dataloader() -> Any:
    """Find the stage of the loader that `Strategy.process_dataloader` was given, or None outside a Trainer.

    The stage of the Trainer is another one where a fit sets up its validation loaders (`_process_dataloader`, 2.6).
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not data_connector._process_dataloader.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["stage"]


def evaluation_loop(trainer: Any) -> Any:
    """The loop that evaluates now, in a fit too (`Trainer._evaluation_loop`, lightning >= 2.0)."""
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def batches_to_evaluate(loop: Any) -> list[int | float]:
    """The number of batches of each loader that runs after the others (`_EvaluationLoop._combined_loader`, 2.0)."""
    combined = loop._combined_loader
    if combined._mode == "sequential":
        return list(loop.max_batches)
    length = sized_len(combined)
    return [float("inf") if length is None else length]


def log_whole_values() -> Callable[[], None]:
    """Let `self.log` and Lightning's `grad_norm` take DTensors, which parameters and gradients are beside the steps.

    Needs `_ResultMetric.update` to be given what is logged, and `torch.tensor` to be how `grad_norm` collects norms
    (lightning 2.6). Both are called by all ranks, as the values are.

    Returns:
        A function that undoes it.
    """
    update = result._ResultMetric.update

    def update_whole(self: Any, value: Any, batch_size: int) -> None:
        update(self, full_tensor(value) if isinstance(value, Tensor) else value, batch_size)

    class TorchOfWholeValues:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def tensor(self, values: list[Tensor]) -> Tensor:
            return torch.stack([full_tensor(value) for value in values])

    def undo() -> None:
        result._ResultMetric.update = update  # type: ignore[method-assign]
        grads.torch = torch  # type: ignore[attr-defined]

    result._ResultMetric.update = update_whole  # type: ignore[method-assign]
    grads.torch = TorchOfWholeValues()  # type: ignore[attr-defined, assignment]
    return undo


def no_advice_to_synchronise() -> Callable[[], None]:
    """Keep Lightning from advising `sync_dist=True` where one rank reads all samples.

    It asks whether processes are many, not whether samples are spread (`result._distributed_is_initialized`, 2.6).

    Returns:
        A function that undoes it.
    """
    module: Any = result
    before = module._distributed_is_initialized
    module._distributed_is_initialized = lambda: False

    def undo() -> None:
        module._distributed_is_initialized = before

    return undo


def before_checking_the_module(check: Callable[[Any], None]) -> None:
    """Call `check` with each module given to a Trainer that is no LightningModule, before the Trainer refuses it.

    The Trainer says no more than that it is none (`_maybe_unwrap_optimized` in `pytorch/trainer/trainer.py`, 2.6).
    """
    module: Any = trainer_module
    original = getattr(module._maybe_unwrap_optimized, "__wrapped__", module._maybe_unwrap_optimized)

    @functools.wraps(original)
    def unwrap(model: Any) -> Any:
        if not isinstance(model, LightningModule):
            check(model)
        return original(model)

    module._maybe_unwrap_optimized = unwrap


def logged_step(trainer: Any) -> int:
    """The step under which the Trainer logs now (`_TrainingEpochLoop._batches_that_stepped`, lightning >= 1.6).

    `global_step` counts the steps of several optimizers one by one.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def default_store() -> Any:
    """The key-value store of the default process group (`_get_default_store`, torch >= 1.8)."""
    return dist.distributed_c10d._get_default_store()


def set_rank(rank: int) -> None:
    """Tell both packages' `rank_zero_only` who this process is (an attribute of the function, lightning >= 1.0)."""
    for module in (rank_zero, fabric_rank_zero):
        module.rank_zero_only.rank = rank


def set_device(module: Any, device: torch.device) -> None:
    """Set what `self.device` says in a LightningModule and those inside it (`_update_properties`, lightning >= 2.2)."""
    _update_properties(module, device=device)


def averaged_model(callback: Any) -> Any:
    """The `AveragedModel` that a `WeightAveraging` callback has made in its setup (`_average_model`, lightning 2.6)."""
    return callback._average_model


def wrap_moves_of_average(callback: Any, around: Callable[..., None]) -> None:
    """Let `around` call what moves values between an averaged model and the module (`WeightAveraging`, 2.6)."""
    for name in ("_swap_models", "_copy_average_to_current"):
        setattr(callback, name, functools.partial(around, getattr(type(callback), name), callback))


def step_and_loop(trainer: Any) -> tuple[str, Any]:
    """The name of the module's step that the run calls first and its loop (attributes of the Trainer, 2.0)."""
    steps = {
        TrainerFn.FITTING: ("training_step", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }
    return steps[trainer.state.fn]


def loader_of_run(loop: Any) -> Any:
    """The loader that a loop is going to use, or None; a user's hook that makes it is called once all the same.

    Needs `_DataLoaderSource` with `dataloader` and `is_defined`, which the loop asks for it later (lightning >= 2.0).
    """
    source = loop._data_source
    if source.instance is None or not source.is_defined():
        return None
    loader = source.dataloader()
    if source.is_module():

        def handed_out() -> Any:
            del source.dataloader
            return loader

        source.dataloader = handed_out
    return loader


def zeroes_gradients(trainer: Any) -> bool:
    """Whether automatic optimisation sets gradients to None after this training step and before its backward.

    It does with the first batch of an accumulation window (`_AutomaticOptimization._make_zero_grad_fn`).
    """
    return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)


@contextmanager
def in_fabric_backward() -> Iterator[None]:
    """Let backward passes inside count as those of `Fabric.backward`, which a wrapped module insists on.

    Sets `lightning.fabric.wrappers._in_fabric_backward`, as `Fabric.backward` does (lightning >= 2.3).
    """
    before = fabric_wrappers._in_fabric_backward
    fabric_wrappers._in_fabric_backward = True
    try:
        yield
    finally:
        fabric_wrappers._in_fabric_backward = before
