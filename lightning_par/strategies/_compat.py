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
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    DistributedSamplerWrapper,
    _all_gather_ddp_if_available,
    _set_num_threads_if_needed,
)
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import grads, rank_zero
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.parallel.shards import full_tensor


def all_gather(tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
    """Gather over a group, differentiable with `sync_grads` (lightning >= 2.0)."""
    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def set_threads(processes: int) -> None:
    """Divide the cores of the node among processes as Lightning's launchers do (`_set_num_threads_if_needed`, 2.1)."""
    _set_num_threads_if_needed(num_processes=processes)


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


def before_fetch(trainer: Any, callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` each time before a training batch is fetched (`_TrainingEpochLoop._on_before_fetch`, 2.0).

    Returns:
        Puts Lightning's own method back.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop._on_before_fetch

    def fetch() -> None:
        callback()
        original()

    loop._on_before_fetch = fetch
    return lambda: loop.__dict__.pop("_on_before_fetch", None) and None


def show_in_progress_bar(trainer: Any, values: dict[str, Any]) -> None:
    """Let progress bars show values until others take their place (`_LoggerConnector._progress_bar_metrics`, 1.5)."""
    trainer._logger_connector._progress_bar_metrics.update(values)


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


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Make what the Trainer saves; collective."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(False)
    return checkpoint


def resume_instead(trainer: Any, resume: Callable[[], tuple[str, dict[str, Any]] | None]) -> Callable[[], None]:
    """Let a fit go on from what `resume` gives, if that is something, in the place of the `ckpt_path` of `fit`.

    It is called when Lightning would read that (`_CheckpointConnector.resume_start`, 2.0). What callbacks save and load
    before, to try something out, has a hidden name.

    Returns:
        Puts Lightning's own way back.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if checkpoint_path and os.path.basename(os.fspath(checkpoint_path)).startswith("."):
            original(checkpoint_path, weights_only)
            return
        undo()
        found = resume()
        if found is None:
            original(checkpoint_path, weights_only)
            return
        path, checkpoint = found
        connector._ckpt_path = path
        connector._loaded_checkpoint = _pl_migrate_checkpoint(checkpoint, path)

    def undo() -> None:
        connector.__dict__.pop("resume_start", None)

    connector.resume_start = resume_start
    return undo


def is_tuning(trainer: Any) -> bool:
    """Whether a fit only looks for a rate or a batch size, as those of `Tuner` do (`_early_exit`, 2.0)."""
    return any(
        isinstance(callback, LearningRateFinder | BatchSizeFinder) and callback._early_exit
        for callback in trainer.callbacks
    )


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader which epoch begins, where they ask for it (`_set_sampler_epoch`, lightning 2.0)."""
    _set_sampler_epoch(loader, epoch)


def distributed_over(sampler: Any) -> Any:
    """The user's sampler in a `DistributedSamplerWrapper` of Lightning (`dataset._sampler`, 2.0), or None elsewhere."""
    if not isinstance(sampler, DistributedSamplerWrapper):
        return None
    samples: Any = sampler.dataset
    return samples._sampler


def index_sampler(loader: Any) -> Any:
    """What decides the indices of a loader, whatever its class says (`DataLoader._index_sampler`, torch >= 1.2)."""
    return DataLoader._index_sampler.fget(loader)  # type: ignore[attr-defined]


def use_index_sampler_of(loader: Any) -> None:
    """Let workers that persist take their indices from `loader._index_sampler`, if a look before has started them.

    The loader keeps their iterator in `_iterator`, which asks the `_index_sampler` it was made with (torch >= 1.7).
    """
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._index_sampler = loader._index_sampler


def has_workers(loader: Any) -> bool:
    """Whether a loader runs workers that persist; making them draws a seed (`DataLoader._iterator`, torch >= 1.7)."""
    return getattr(loader, "_iterator", None) is not None


def validation_loaders(trainer: Any) -> list[Any]:
    """The loaders that a fit validates on; none before they are set up (`_combined_loader`, 2.0)."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of the fit loop, one after the other; none before they are set up (`_combined_loader`, 2.0)."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def training_loaders_cycle(trainer: Any) -> bool:
    """Whether shorter loaders begin again until the longest one ends (`CombinedLoader._mode`, lightning 2.0)."""
    return bool(trainer.fit_loop._combined_loader._mode == "max_size_cycle")


def fit_progress(trainer: Any) -> dict[str, Any]:
    """What the fit loop puts into a checkpoint about where it is (`_Loop.state_dict`, lightning 2.0)."""
    loop = trainer.fit_loop
    return {
        "epoch_progress": loop.epoch_progress.state_dict(),
        "epoch_loop.batch_progress": loop.epoch_loop.batch_progress.state_dict(),
        "epoch_loop.val_loop.batch_progress": loop.epoch_loop.val_loop.batch_progress.state_dict(),
    }


def begin_epoch_afresh(trainer: Any) -> None:
    """Let the fit loop begin an epoch as in a run that goes on, after a load between two epochs.

    With `max_steps` Lightning takes any loaded state for one within an epoch (`_FitLoop.restarting`, 2.6).
    """
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def begin_batches_afresh(trainer: Any) -> None:
    """Let the epoch at which a fit resumes begin with its first batch, without what follows a batch."""
    _Loop.restarting.fset(trainer.fit_loop.epoch_loop, False)  # type: ignore[attr-defined]


def steps_after_batch(trainer: Any) -> tuple[bool, bool]:
    """Whether the batch at which a fit resumes ended an accumulation window, and whether a validation follows it.

    Needs `_should_accumulate`, `_should_check_val_fx` and the fit loop's `_data_fetcher` (lightning 2.6).
    """
    loop = trainer.fit_loop.epoch_loop
    return not loop._should_accumulate(), bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def count_logged_steps(trainer: Any, more: int) -> None:
    """Correct the step under which the Trainer logs (`_batches_that_stepped`, lightning >= 1.6)."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += more


def set_batch_in_epoch(trainer: Any, batches: int) -> None:
    """Set how many batches of the epoch count as trained (`batch_progress.current`, lightning >= 1.6)."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = batches


def end_epoch_without_batch(trainer: Any) -> None:
    """Let the epoch at whose last batch a fit resumes end without another one (`_DataFetcher.done`, lightning 2.0)."""
    fetcher = trainer.fit_loop._data_fetcher
    fetcher.done = True
    if hasattr(fetcher, "batches"):
        fetcher.batches = []


def reload_epochs(trainer: Any) -> list[int]:
    """The epochs in which the loaders for training and validation were made (`_last_*_dl_reload_epoch`, 2.0)."""
    loop = trainer.fit_loop
    epochs = (loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch)
    return [-1 if epoch == float("-inf") else int(epoch) for epoch in epochs]


def set_reload_epochs(trainer: Any, epochs: list[int]) -> None:
    """Restore what `reload_epochs` gave, so that `reload_dataloaders_every_n_epochs` counts on."""
    train, val = epochs
    if train >= 0:
        trainer.fit_loop._last_train_dl_reload_epoch = train
    if val >= 0:
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = val


def monitored_values(trainer: Any) -> dict[str, Tensor]:
    """The last values of what callbacks and schedulers monitor, those of a batch that has not quite ended too."""
    values = trainer.callback_metrics
    return {name: value.detach().cpu().clone() for name, value in values.items() if isinstance(value, Tensor)}


def go_on_with_monitors(trainer: Any, values: dict[str, Tensor]) -> None:
    """Restore what `monitored_values` gave, and let schedulers use it at the end of the epoch in which a fit resumes.

    Lightning leaves these out in a fit loop that is `restarting` (2.6).
    """
    trainer._logger_connector._callback_metrics.update(values)
    trainer.fit_loop._restarting = False


def read_loaders_again(trainer: Any) -> None:
    """Make the iterators of the training loaders anew (`_FitLoop._data_fetcher`, 2.0)."""
    iter(trainer.fit_loop._data_fetcher)


def begin_epoch_of_callbacks(trainer: Any) -> None:
    """Let callbacks set up the epoch that a fit resumes within: Lightning calls them only at its begin (2.6).

    Both do nothing twice: the averaging keeps in its state which epochs it has counted.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def end_batch_of_schedulers(trainer: Any) -> None:
    """Step the schedulers that monitor a value as after a batch (`update_lr_schedulers`, 2.0)."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def end_epoch_of_schedulers(trainer: Any) -> None:
    """Step the schedulers that monitor a value as at the end of the last epoch (`update_lr_schedulers`, 2.0)."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed -= 1
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.completed += 1
