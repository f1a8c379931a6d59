"""What of a fit goes back with a rewind beside modules and optimizers, and what a left-out step leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from lightning_par.errors import Problem
from lightning_par.strategies import _compat, _compat_steps, resumption

State = dict[str, Any]


class _Never(int):
    """A frequency that no number of a batch is a multiple of, not even 0: a loop that went back may be there."""

    def __rmod__(self, other: int) -> int:
        return 1


def scaler_of(trainer: Any) -> Any:
    """The fp16 scaler of a Trainer, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)


def batches_done(trainer: Any) -> int:
    """How many batches of this epoch have been read, the one that runs among them."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def averages(trainer: Any) -> dict[str, nn.Module]:
    """The averaged models that callbacks of a fit keep."""
    found = [_compat.averaged_model(one) for one in trainer.callbacks if isinstance(one, WeightAveraging)]
    return {f"average {i}": model for i, model in enumerate(found) if model is not None}


def average_only_accepted(
    trainer: Any, accepted: Callable[[], bool], left_out: Callable[[], int]
) -> Callable[[], None]:
    """Let averages of weights see steps as in a run without those that were left out.

    Args:
        trainer: Whose callbacks.
        accepted: Says after a batch whether its step was taken.
        left_out: Says how many steps were left out; they are in the numbers of steps.

    Returns:
        A function that undoes it.
    """
    callbacks = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
    for callback in callbacks:
        callback.should_update = _asking(callback.should_update, accepted, left_out)  # type: ignore[method-assign]

    def undo() -> None:
        for callback in callbacks:
            callback.__dict__.pop("should_update", None)

    return undo


def _asking(
    should_update: Callable[..., bool], accepted: Callable[[], bool], left_out: Callable[[], int]
) -> Callable[..., bool]:
    def ask(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return should_update(step_idx=None, epoch_idx=epoch_idx)
        return accepted() and should_update(step_idx=step_idx - left_out(), epoch_idx=epoch_idx)

    return ask


def hold_schedulers(trainer: Any, optimizer: Any) -> Callable[[], None]:
    """Let no scheduler of an optimizer step that steps with batches; those of epochs go on.

    With manual optimisation a scheduler says nothing of the kind: it is held whoever calls it.

    Returns:
        A function that lets them go.
    """
    automatic = trainer.lightning_module.automatic_optimization
    held = [
        config
        for config in trainer.lr_scheduler_configs
        if config.scheduler.optimizer is optimizer and _goes_back(trainer, config)
    ]
    if not automatic:
        for config in held:
            _stop(config.scheduler)

        def release() -> None:
            for config in held:
                config.scheduler.__class__ = getattr(config.scheduler, "goes_on_as", type(config.scheduler))

        return release
    # `lr_scheduler_step` of the module may call another method than `step`.
    frequencies = [config.frequency for config in held]
    for config in held:
        config.frequency = _Never(1)

    def put_back() -> None:
        for config, frequency in zip(held, frequencies, strict=True):
            config.frequency = frequency

    return put_back


def _stop(scheduler: Any) -> None:
    # An attribute of the scheduler would be part of its state, and in a checkpoint that is saved now.
    cls = getattr(scheduler, "goes_on_as", type(scheduler))
    scheduler.__class__ = type(cls.__name__, (cls,), {"step": _do_nothing, "goes_on_as": cls})


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def keep_scale(scaler: Any) -> Callable[[], None]:
    """Let the next `update` of an fp16 scaler change neither its scale nor its count.

    It takes gradients that are not finite for too large a scale, and other optimizers may step with it in this batch.

    Returns:
        A function that undoes it, where there was no update.
    """
    update = scaler.update

    def undo() -> None:
        scaler.__dict__.pop("update", None)

    def update_nothing(new_scale: Any = None) -> None:
        undo()
        before = scaler.state_dict()
        update(new_scale)
        scaler.load_state_dict(before)

    scaler.update = update_nothing
    return undo


def capture(trainer: Any) -> State:
    """What goes back with a rewind, beside what a `SnapshotRing` copies."""
    scaler = scaler_of(trainer)
    return {
        "counts": _compat_steps.step_counts(trainer),
        "schedulers": capture_schedulers(trainer),
        "scaler": None if scaler is None else scaler.state_dict(),
        "averages": [one.state_dict() for one in trainer.callbacks if isinstance(one, WeightAveraging)],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def capture_schedulers(trainer: Any) -> dict[int, State]:
    """The state of each scheduler, by its `id`: callbacks may put others in their place."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {id(one): _copied(trainer, one.state_dict()) for one in schedulers}


def load_scheduler(trainer: Any, scheduler: Any, state: State) -> None:
    """Let a scheduler go on from a state, which stays as it is."""
    scheduler.load_state_dict(_copied(trainer, state))


def _copied(trainer: Any, state: State) -> State:
    # One that hands over to another scheduler has it in its state, and with it the optimizer.
    return copy.deepcopy(state, {id(optimizer): optimizer for optimizer in trainer.optimizers})


def restore(trainer: Any, state: State, *, epoch_goes_on: bool = False) -> None:
    """Go back to what `capture` gave.

    Args:
        trainer: Has gone back.
        state: What `capture` gave.
        epoch_goes_on: Whether the batches of the epoch come again, so that its end comes again too.
    """
    _compat_steps.set_step_counts(trainer, state["counts"])
    _restore_schedulers(trainer, state["schedulers"], of_epochs=epoch_goes_on)
    scaler = scaler_of(trainer)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    callbacks = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
    for callback, saved in zip(callbacks, state["averages"], strict=True):
        callback.load_state_dict(saved)


def restore_checkpoint(trainer: Any, checkpoint: State) -> None:
    """Go on with the counts, schedulers and scaler of a checkpoint, from which model and optimizers were loaded."""
    _compat_steps.set_step_counts(trainer, _compat_steps.saved_step_counts(checkpoint))
    _restore_schedulers(trainer, saved_schedulers(trainer, checkpoint))
    plugin = trainer.precision_plugin
    saved = checkpoint.get(type(plugin).__qualname__)
    if saved is not None:
        plugin.load_state_dict(saved)
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging) and callback.state_key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])


def saved_schedulers(trainer: Any, checkpoint: State) -> dict[int, State]:
    """What `capture_schedulers` gave when a checkpoint was saved."""
    schedulers = [id(config.scheduler) for config in trainer.lr_scheduler_configs]
    return dict(zip(schedulers, checkpoint["lr_schedulers"], strict=True))


def hyper_parameters(trainer: Any) -> list[list[State]]:
    """Those of each group of each optimizer."""
    return [
        [copy.deepcopy({n: v for n, v in group.items() if n != "params"}) for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]


def keep_rates_of_epochs(trainer: Any, before: list[list[State]], schedulers: dict[int, State]) -> None:
    """Let optimizers keep the rates that a scheduler of epochs has set since the state to which training went back.

    An epoch that is over is not begun again, so its schedulers do not go back.

    Args:
        trainer: Has gone back.
        before: What `hyper_parameters` gave before that.
        schedulers: The states of the schedulers in what it has gone back to.
    """
    for config in trainer.lr_scheduler_configs:
        saved = schedulers.get(id(config.scheduler))
        if not _goes_back(trainer, config) and config.scheduler.state_dict() != saved:
            set_rates(trainer, config.scheduler.optimizer, before)


def set_rates(trainer: Any, optimizer: Any, rates: list[list[State]]) -> None:
    """Give the groups of an optimizer what `hyper_parameters` gave."""
    for group, values in zip(optimizer.param_groups, rates[trainer.optimizers.index(optimizer)], strict=True):
        group.update(values)


def _goes_back(trainer: Any, config: Any) -> bool:
    return config.interval == "step" or not trainer.lightning_module.automatic_optimization


def _restore_schedulers(trainer: Any, schedulers: dict[int, State], *, of_epochs: bool = False) -> None:
    for config in trainer.lr_scheduler_configs:
        saved = schedulers.get(id(config.scheduler))
        if saved is not None and (of_epochs or _goes_back(trainer, config)):
            load_scheduler(trainer, config.scheduler, saved)


# -- data -------------------------------------------------------------------------------------------------------------


def replay_problems(trainer: Any) -> list[Problem]:
    """Why the loaders of a fit cannot give batches again."""
    loaders = _compat.training_loaders(trainer)
    return [
        Problem(
            f"data is 'replay', and training loader {i} ({type(loader).__name__}) cannot go back to a batch: it has "
            "no state_dict",
            "data='skip_past', a map-style dataset, or a loader with state_dict and load_state_dict",
            "data: skip_past",
        )
        for i, loader in enumerate(loaders)
        if not (hasattr(loader, "follower") or isinstance(loader, resumption.Remembered))
    ]


def sample_ids(trainer: Any, batches: int, window: int) -> list[Any] | None:
    """The samples of the last `window` of the `batches` of this epoch, as indices; None where nobody knows them."""
    found: list[Any] = []
    for loader in _compat.training_loaders(trainer):
        if not hasattr(loader, "follower"):
            return None
        for batch in range(batches - window, batches):
            found.append(loader.follower.indices_of(batch))
    return None if not found or None in found else [index for batch in found for index in batch]


def replay(trainer: Any, epoch: int, place: State) -> bool:
    """Let the loaders go back to where they were; at the end of a batch, on all ranks.

    Args:
        trainer: Whose loaders.
        epoch: In which they were.
        place: What `resumption.rank_state` gave.

    Returns:
        Whether they did: an epoch that is over is not begun again.
    """
    loaders, states, batches = _compat.training_loaders(trainer), place.get("loaders", []), place.get("batches")
    if epoch != trainer.current_epoch:
        return False
    if batches is None:
        # It was before the first batch of this epoch.
        batches = 0
        followed = all(hasattr(loader, "follower") for loader in loaders)
        states = [loader.follower.place(loader, 0) for loader in loaders] if followed else []
        states = [{"kind": "none"} if state is None else state for state in states]
    if len(states) != len(loaders) or any(state["kind"] == "none" for state in states):
        return False
    for loader, state in zip(loaders, states, strict=True):
        if hasattr(loader, "follower"):
            loader.follower.pending = state
        else:
            loader.load_state_dict(copy.deepcopy(state["state"]))
            type(loader)._begun_at = state["batches"]
    _compat_steps.go_back_to_batch(trainer, batches)
    return True
