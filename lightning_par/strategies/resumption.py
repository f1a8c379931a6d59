"""Resume a fit in the middle of an epoch: each rank's loaders go on at the sample where they were.

Lightning saves the loaders' state of rank 0 only, begins an ordinary `DataLoader` again from its first sample, and
loses or repeats validations and counts where a checkpoint was saved beside a step's end. Here each data rank saves the
place of its loaders, counted in batches that the loop has trained on, and the loops' counts are put right on a resume.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.errors import Problem
from lightning_par.parallel.random import random_state_kept
from lightning_par.strategies import _compat
from lightning_par.strategies.replay import RESTART_INSTEAD, Follower, can_follow, follow
from lightning_par.strategies.sampler_order import is_stateful, sampler_of

State = dict[str, Any]
Fit = dict[str, Any]
# How far the loop was: between two batches; after a step, before the validation that may follow; after that one; at the
# end of an epoch, before schedulers that monitor something are stepped.
Done = Literal["batch", "step", "validation", "epoch"]


@dataclass
class Position:
    """Where in the fit a checkpoint was saved.

    Attributes:
        batches: How many batches of the epoch are trained on; None between two epochs.
        done: How much of the last of them was done.
        last: Whether the epoch has no more.
    """

    batches: int | None
    done: Done = "batch"
    last: bool = False


@dataclass
class Pending:
    """What `restore` was given, until the loaders are there."""

    own: State | None
    first: State | None
    saved_data_size: int
    position: Position
    lightning_states: list[Any]
    attached: bool = False
    restart: bool = False
    error: CheckpointError | None = None


@dataclass
class Resumption:
    """What a strategy keeps about the loaders of its fit."""

    data_size: int
    data_rank: int
    pending: Pending | None = None
    validation_workers: bool = False


# -- where a fit is ---------------------------------------------------------------------------------------------------


def position(fit: Fit, validating: bool) -> Position:
    """Tell where a fit was when its loops' state was taken; `validating`: within the validation after a batch."""
    epochs, batches = fit["epoch_progress"]["total"], fit["epoch_loop.batch_progress"]
    now, last = batches["current"], batches["is_last_batch"]
    if epochs["started"] == epochs["processed"]:
        return Position(None, "epoch" if last and epochs["completed"] < epochs["processed"] else "batch")
    if now["processed"] > now["completed"]:
        return Position(now["processed"], "step", last)
    if now["ready"] > now["completed"]:
        # The next batch has begun: what is known of the last one belongs to it.
        return Position(now["completed"])
    if not validating:
        return Position(now["completed"], "batch", last)
    within = fit["epoch_loop.val_loop.batch_progress"]["current"]
    over = within["ready"] == within["completed"] > 0
    # A validation that was cut off is run again as a whole.
    return Position(now["completed"], "validation" if over else "step", last)


def _put_right(fit: Fit, place: Position, lost: int) -> Position:
    """Bring a loops' state into a form from which Lightning goes on as if it had not stopped.

    Args:
        fit: State of the fit loop, changed in place.
        place: Where it was.
        lost: The number of batches whose gradients were in no step yet, which are trained on again.
    """
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    evaluated = fit["epoch_loop.val_loop.batch_progress"]
    done = epochs["total"]["processed"]
    # An epoch whose end was being saved counts as over; one that was about to begin has not begun.
    begun = done if place.batches is None else done + 1
    for counts in (epochs["total"], epochs["current"]):
        counts.update(ready=begun, started=begun, processed=done, completed=done)
    total = batches["total"]["processed" if place.done == "step" or place.batches is None else "completed"]
    if lost and place.batches is not None:
        place, total = Position(place.batches - lost), total - lost
    _set_all(batches["current"], place.batches or 0)
    _set_all(batches["total"], total)
    batches["is_last_batch"] = place.last
    if place.done != "validation":
        _set_all(evaluated["current"], 0)
        _set_all(evaluated["total"], 0)
    else:
        _set_all(evaluated["total"], evaluated["current"]["completed"])
    if place.done == "step":
        # Lightning runs a validation from which it seems to have been called away, where one is due, and no other.
        evaluated["total"].update(ready=1, started=1)
    return place


def _set_all(counts: dict[str, int], value: int) -> None:
    counts.update(dict.fromkeys(counts, value))


# -- saving -----------------------------------------------------------------------------------------------------------


def rank_state(trainer: Any) -> State:
    """What this rank needs to go on with its loaders where the training loop is: plain types and tensors.

    Empty where nothing is trained.
    """
    loaders = _compat.training_loaders(trainer)
    if not loaders:
        return {}
    resumption = trainer.strategy.resumption
    place = position(_compat.fit_progress(trainer), trainer.validating)
    state: State = {
        "data_size": resumption.data_size,
        "validating": trainer.validating,
        "reloaded": _compat.reload_epochs(trainer),
        "metrics": _compat.monitored_values(trainer),
        "validation_workers": any(map(_compat.has_workers, _compat.validation_loaders(trainer))),
        "batches": place.batches,
        "lost": 0,
        "unfinished": 0,
        "loaders": [],
    }
    if place.batches is None:
        state["loaders"] = [_between_epochs(loader) for loader in loaders]
        return state
    over = 0 if place.last else place.batches % trainer.accumulate_grad_batches
    state["lost" if all(hasattr(loader, "follower") for loader in loaders) else "unfinished"] = over
    cycles = _compat.training_loaders_cycle(trainer)
    state["loaders"] = [_within_epoch(loader, place.batches, state["lost"], cycles) for loader in loaders]
    return state


def _between_epochs(loader: Any) -> State:
    if hasattr(loader, "follower"):
        return loader.follower.generators(loader)
    return {"kind": "none"}


def _within_epoch(loader: Any, batches: int, lost: int, cycles: bool) -> State:
    if hasattr(loader, "follower"):
        here, wanted, which = batches, batches - lost, -1
        length = sized_len(loader)
        if length:
            # A shorter loader has begun again, or has ended.
            passes, wanted_passes = (max(0, n - 1) // length if cycles else 0 for n in (here, wanted))
            wanted = min(wanted - length * wanted_passes, length)
            which -= passes - wanted_passes
        found = loader.follower.place(loader, wanted, which)
        return found or {"kind": "none"}
    if isinstance(loader, Remembered):
        return loader.state_after(batches)
    return {"kind": "none"}


def without_views(trainer: Any, checkpoint: State) -> None:
    """Leave in Lightning's own list of loaders only those that plain Lightning has a state for."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = [loader for loader in _compat.training_loaders(trainer) if is_stateful(loader)]
    pairs = zip(loaders, fit.pop("combined_loader", []), strict=False)
    states = [state for loader, state in pairs if not hasattr(loader, "follower")]
    if states:
        fit["combined_loader"] = states


# -- loaders with a state ---------------------------------------------------------------------------------------------


class Remembered:
    """What `watch` puts before the class of a loader that saves its own state.

    Where the loop reads ahead, because the loader has no length, the state after each batch is kept until the next.
    """

    _resumption: Resumption
    _attach: Any
    _epoch: Any
    _given: int
    _begun_at: int
    _states: dict[int, Any]

    def __iter__(self) -> Iterator[Any]:
        kind: Any = type(self)
        kind._attach()
        _compat.set_sampler_epoch(self, kind._epoch())
        kind._given, kind._begun_at, kind._states = self._begun_at, 0, {}
        # What is drawn when an iterator is made was drawn at the begin of the epoch.
        with random_state_kept() if self._given else nullcontext():
            return self._counted(iter(super().__iter__()))  # type: ignore[misc]

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        kind: Any = type(self)
        reads_ahead = sized_len(self) is None
        for batch in batches:
            kind._given += 1
            if reads_ahead:
                kind._states = {**dict([*self._states.items()][-1:]), self._given: copy.deepcopy(self.state_dict())}  # type: ignore[attr-defined]
            yield batch

    def run_out(self) -> None:
        """Come to the end of an iteration that has no more batches; some loaders only then begin anew."""
        with random_state_kept():
            next(iter(super().__iter__()), None)  # type: ignore[misc]

    def state_after(self, batches: int) -> State:
        """The state of the loader when the loop had used that many batches."""
        if batches in self._states:
            return {"kind": "stateful", "state": self._states[batches], "batches": batches}
        if batches == self._given:
            return {"kind": "stateful", "state": copy.deepcopy(self.state_dict()), "batches": batches}  # type: ignore[attr-defined]
        return {"kind": "none"}


def _watch(loader: Any, attach: Any, epoch: Any) -> Any:
    cls = type(loader)
    members = {
        "_attach": staticmethod(attach),
        "_epoch": staticmethod(epoch),
        "_given": 0,
        "_begun_at": 0,
        "_states": {},
    }
    view: Any = object.__new__(type(cls.__name__, (Remembered, cls), members))
    view.__dict__ = loader.__dict__
    return view


def watch(loader: Any, trainer: Any) -> Any:
    """Make a training loader find its place again; returns a view of it, or the loader where that cannot be done."""
    resumption = trainer.strategy.resumption
    pending = resumption.pending
    if pending is not None and pending.position.batches is None:
        _compat.begin_epoch_afresh(trainer)
    attach = partial(_attach, trainer)
    postpone = partial(_postpone, trainer)
    epoch = lambda: int(trainer.fit_loop.epoch_progress.current.processed)
    if can_follow(loader):
        return follow(loader, Follower(resumption.data_size, resumption.data_rank, epoch, attach, postpone))
    return _watch(loader, attach, epoch) if is_stateful(loader) and hasattr(loader, "__dict__") else loader


class Unseeded:
    """What `watch_validation` puts before the class of a loader."""

    def __iter__(self) -> Any:
        before = None if _compat.has_workers(self) else torch.get_rng_state()
        batches = super().__iter__()  # type: ignore[misc]
        if before is not None:
            torch.set_rng_state(before)
        return batches


def watch_validation(loader: Any, trainer: Any) -> Any:
    """After a resume, let workers that persist start without a draw, as they ran already when the run was saved."""
    persist = isinstance(loader, DataLoader) and loader.persistent_workers
    if not (persist and trainer.strategy.resumption.validation_workers):
        return loader
    cls = type(loader)
    view: Any = object.__new__(type(cls.__name__, (Unseeded, cls), {}))
    view.__dict__ = loader.__dict__
    return view


# -- loading ----------------------------------------------------------------------------------------------------------


def restore(trainer: Any, meta: State, own: State | None, first: State | None, saved_data_size: int) -> None:
    """Take up where a checkpoint was saved. Called on all ranks when fitting, before Lightning's loops load.

    Args:
        trainer: Whose strategy has just loaded the model.
        meta: Lightning's checkpoint; its loops' state is put right.
        own: What the rank with the same data rank saved; None if the number of data ranks is another one.
        first: What data rank 0 saved; None for checkpoints that hold nothing of the kind.
        saved_data_size: How many data ranks saved.
    """
    fit = meta.get("loops", {}).get("fit_loop")
    if not fit or "epoch_loop.batch_progress" not in fit:
        return
    first = first or None
    states = fit.get("state_dict", {}).pop("combined_loader", [])
    where = position(fit, True if first is None else first["validating"])
    where = _put_right(fit, where, 0 if first is None else first["lost"])
    if first is not None and first["unfinished"]:
        rank_zero_warn(
            f"The checkpoint was saved within an accumulation window: the gradients of {first['unfinished']} batches "
            "are lost, since loaders with a state_dict cannot go back to its first batch."
        )
    trainer.strategy.resumption.pending = Pending(own or None, first, saved_data_size, where, states)
    trainer.strategy.resumption.validation_workers = first is not None and first["validation_workers"]


def _postpone(trainer: Any, error: CheckpointError) -> None:
    """Keep an error until the loaders are iterated: one that is raised before hides behind those of the clean-up."""
    pending = trainer.strategy.resumption.pending
    pending.error = pending.error or error


def _attach(trainer: Any) -> None:
    """Give each loader its place, once, when the first of them is iterated and all are known."""
    pending = trainer.strategy.resumption.pending
    loaders = _compat.training_loaders(trainer)
    if pending is None or pending.attached or not loaders:
        return
    pending.attached = True
    try:
        _go_to_places(trainer, pending, loaders)
    except CheckpointError as error:
        _postpone(trainer, error)


def _go_to_places(trainer: Any, pending: Pending, loaders: list[Any]) -> None:
    saved = (pending.own or pending.first or {}).get("loaders")
    if saved is not None and len(saved) != len(loaders):
        raise checkpoint_error(
            "the training loaders are not those of the checkpoint",
            [Problem(f"it has {len(saved)}, here are {len(loaders)}", "give Trainer.fit the same loaders")],
        )
    if pending.position.batches is None:
        for loader, state in zip(loaders, (pending.own or {}).get("loaders", []), strict=False):
            if hasattr(loader, "follower") and state["kind"] == "map":
                loader.follower.pending_begin = state
        return
    if trainer.strategy.on_lost_place == "restart_epoch":
        # Where one rank begins the epoch again, all of them have to.
        pending.restart = trainer.strategy.reduce_boolean_decision(_find_lost(pending, loaders), all=False)
        if pending.restart:
            return
    if saved is None:
        saved = _of_lightning(pending, loaders)
    for i, (loader, state) in enumerate(zip(loaders, saved, strict=True)):
        _go_to(loader, state, pending, i)


def _of_lightning(pending: Pending, loaders: list[Any]) -> list[State]:
    """What a checkpoint of plain Lightning holds: states of rank 0, of those loaders that save one."""
    states = iter(pending.lightning_states)
    return [
        {"kind": "stateful", "state": next(states, None), "batches": pending.position.batches}
        if isinstance(loader, Remembered)
        else {"kind": "none"}
        for loader in loaders
    ]


def _find_lost(pending: Pending, loaders: list[Any]) -> bool:
    """Whether some loader cannot go to its place."""
    saved = (pending.own or pending.first or {}).get("loaders") or [{"kind": "none"}] * len(loaders)
    return any(
        _problem(loader, state, pending, trying=True) is not None for loader, state in zip(loaders, saved, strict=True)
    )


def _problem(loader: Any, state: State, pending: Pending, *, trying: bool = False) -> Problem | None:
    name = type(loader).__name__
    if hasattr(loader, "follower") and state["kind"] == "map":
        return loader.follower.why_not(loader, state, trying=trying)
    if isinstance(loader, Remembered) and state["kind"] == "stateful":
        if pending.own is not None or pending.first is None:
            return None
        return Problem(
            f"{name} saved the state of each of {pending.saved_data_size} data ranks, and states cannot be dealt out "
            "to another number of them",
            f"resume with {pending.saved_data_size} data ranks. {RESTART_INSTEAD}",
        )
    return Problem(f"{name} has no state_dict", RESTART_INSTEAD)


def _go_to(loader: Any, state: State, pending: Pending, index: int) -> None:
    problem = _problem(loader, state, pending)
    batches = pending.position.batches
    if state["kind"] == "none" or not (hasattr(loader, "follower") or isinstance(loader, Remembered)):
        rank_zero_warn(
            f"Resumed at batch {batches} of an epoch, but training loader {index} ({type(loader).__name__}) cannot "
            f"find that place again: it starts from its first sample, so its first {batches} batches are used twice "
            "in this epoch, and as many others not at all. Give the loader state_dict and load_state_dict, as "
            "torchdata's StatefulDataLoader has, use a map-style dataset, or save at the ends of epochs."
        )
        return
    if problem is not None:
        raise checkpoint_error(f"training loader {index} cannot find its place in the epoch again", [problem])
    if hasattr(loader, "follower"):
        loader.follower.pending = state
    elif state["state"] is not None:
        if isinstance(loader, DataLoader) and _compat.distributed_over(sampler_of(loader)) is not None:
            rank_zero_warn(
                f"The state of training loader {index} ({type(loader).__name__}) does not hold the order of its "
                "samples, as Lightning has put a sampler of its own over the loader's, which draws it: the rest of "
                "this epoch may have samples that were used before. Give the loader a distributed sampler yourself, as "
                "torchdata's StatefulDistributedSampler, and the Trainer use_distributed_sampler=False."
            )
        loader.load_state_dict(state["state"])
        type(loader)._begun_at = state["batches"]


def _read_again(trainer: Any, pending: Pending) -> None:
    """Make the iterators of loaders again that were made before the checkpoint was loaded.

    `trainer.estimated_stepping_batches` in `configure_optimizers` makes them so early.
    """
    if pending.position.batches is None:
        _compat.begin_epoch_afresh(trainer)
    loaders = _compat.training_loaders(trainer)
    if any(hasattr(loader, "follower") or isinstance(loader, Remembered) for loader in loaders):
        _compat.read_loaders_again(trainer)


def begin(trainer: Any) -> None:
    """Put the loops' counts right when everything is set up and the first batch has not been read."""
    resumption = trainer.strategy.resumption
    pending = resumption.pending
    if pending is None:
        return
    was_read_early = not pending.attached
    _attach(trainer)
    resumption.pending = None
    everywhere = trainer.strategy.reduce_boolean_decision(pending.error is None)
    if pending.error is not None:
        raise pending.error
    if not everywhere:
        raise CheckpointError("other ranks cannot find the places of their loaders again, and none trains alone")
    if was_read_early:
        _read_again(trainer, pending)
    if pending.first is not None:
        _compat.set_reload_epochs(trainer, pending.first["reloaded"])
        _compat.go_on_with_monitors(trainer, (pending.own or pending.first)["metrics"])
        if pending.position.done == "epoch":
            _compat.end_epoch_of_schedulers(trainer)
    if pending.position.batches is None:
        return
    if pending.restart or not pending.position.batches:
        _compat.begin_batches_afresh(trainer)
        return
    last, place = pending.position.last, pending.position.batches
    loaders = _compat.training_loaders(trainer)
    dealt = [loader.follower.dealt_at for loader in loaders if hasattr(loader, "follower")]
    if any(n is not None for n in dealt):
        place = max(n for n in dealt if n is not None)
        _compat.set_batch_in_epoch(trainer, place)
        last = False
    # Some callbacks set at the begin of an epoch how the rest of it goes.
    _compat.begin_epoch_of_callbacks(trainer)
    stepped, validates = _compat.steps_after_batch(trainer)
    if pending.position.done == "step" and not validates:
        _compat.end_batch_of_schedulers(trainer)
    if pending.position.done == "step" and stepped and not validates:
        _compat.count_logged_steps(trainer, 1)
    elif pending.position.done == "batch" and stepped and validates:
        _compat.count_logged_steps(trainer, -1)
    if last or place >= trainer.num_training_batches:
        _compat.end_epoch_without_batch(trainer)
        for loader in loaders:
            if isinstance(loader, Remembered):
                loader.run_out()
