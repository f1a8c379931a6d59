"""Finds the place of a map-style loader within its epoch again, without loading what was used before.

What a loader yields is decided by its batch sampler, and that one by random generators, by the epoch, and by its own
state. They are noted when an iteration begins. To come back, the batch sampler is run again from there and the batches
that were used are dropped, as lists of indices. Where the number of data ranks or the size of the batches is another
one, what is left of the order of all ranks is dealt out anew.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_par.checkpoint.errors import CheckpointError, checkpoint_error
from lightning_par.checkpoint.sampler import remaining_samples
from lightning_par.errors import Problem
from lightning_par.strategies import _compat
from lightning_par.strategies.sampler_order import (
    describe_order,
    generators_at,
    geometry,
    has_plain_batches,
    host_random_state,
    is_stateful,
    keep_seed,
    own_state,
    rebuild_order,
    sampler_of,
    set_own_state,
)

State = dict[str, Any]
OnLostPlace = Literal["error", "restart_epoch"]
"""What a resume does with a loader whose place in the epoch cannot be found again on these ranks."""

# Batches whose indices are kept for messages; workers read ahead of the loop.
_REMEMBERED = 512
RESTART_INSTEAD = "To begin the epoch again, give the strategy on_lost_place='restart_epoch'."


class Pass:
    """One iteration over the batch sampler: what it began with, and what it gave out.

    Attributes:
        at_iter: State of the generators when the loader's iterator was made, which draws the seed of the workers.
        at_first: That when the sampler was first asked; None before it was.
        order: How the order of all ranks can be made again, or None where only a replay can.
        before: Samples that all ranks together had used before it began.
        batches_before: The number of batches that counts as.
        dealt: Whether it has the rest of an epoch that was begun on other ranks.
    """

    def __init__(self, at_iter: State) -> None:
        self.at_iter = at_iter
        self.at_first: State | None = None
        self.order: State | None = None
        self.before = 0
        self.batches_before = 0
        self.dealt = False
        self._digests = array("L")
        self._samples = array("L")
        self._recent: deque[Any] = deque(maxlen=_REMEMBERED)

    def take(self, batch: Any) -> None:
        """Note the next batch of indices."""
        self._recent.append(batch)
        before = self._digests[-1] if self._digests else 0
        self._digests.append(zlib.crc32(_content(batch), before))
        self._samples.append((self._samples[-1] if self._samples else 0) + _size(batch))

    def digest(self, batches: int) -> int:
        """A number that tells the first batches from others."""
        return self._digests[batches - 1] if batches else 0

    def samples(self, batches: int) -> int:
        """How many samples the first batches of this rank have."""
        return self._samples[batches - 1] if batches else 0

    def indices_of(self, batch: int) -> Any:
        """The indices of a batch of the pass, counted from 0; None if it is too long ago."""
        first = self.given - len(self._recent)
        return self._recent[batch - first] if first <= batch < self.given else None

    @property
    def given(self) -> int:
        """How many batches were given out; with workers that is more than the loop has used."""
        return len(self._digests)


def _content(batch: Any) -> bytes:
    try:
        return array("q", batch).tobytes()
    except (TypeError, OverflowError):
        return repr(batch).encode()


def _size(batch: Any) -> int:
    try:
        return len(batch)
    except TypeError:
        return 1


class Follower:
    """Notes how a loader makes its order, and brings it back to a place; one for each loader of a run.

    Args:
        data_size: Number of data ranks.
        data_rank: Which of them this is.
        epoch: Returns the epoch for which the loader is going to be iterated.
        prepare: Called before an iterator is made.
        postpone: Given the error if the place is not found; the loader then begins at its first sample. None raises.

    Attributes:
        pending: A place to go to with the next iteration.
        pending_begin: What `generators` gave, for the next iteration.
    """

    def __init__(
        self,
        data_size: int,
        data_rank: int,
        epoch: Callable[[], int],
        prepare: Callable[[], None] = lambda: None,
        postpone: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self.data_size, self.data_rank = data_size, data_rank
        self.epoch, self.prepare, self.postpone = epoch, prepare, postpone
        self.pending: State | None = None
        self.pending_begin: State | None = None
        self.passes: list[Pass] = []
        # Of the iterator that is being made.
        self._place: State | None = None
        self._rest: list[Any] | None = None
        self._unseeded = False
        self._start: Callable[[], None] = lambda: None

    # -- saving ---------------------------------------------------------------------------------------------------

    def place(self, loader: Any, batches: int, of: int = -1) -> State | None:
        """Describe the place after some batches of a pass, in plain types and tensors; None if nothing was noted.

        Args:
            loader: The loader.
            batches: How many batches of the pass the loop has used.
            of: Which of the last two passes; the last one by default.
        """
        batches -= self.passes[of].batches_before if len(self.passes) >= -of else 0
        if len(self.passes) < -of or not 0 <= batches <= self.passes[of].given:
            return None
        run = self.passes[of]
        return {
            "kind": "map",
            "batches": batches,
            "digest": run.digest(batches),
            "samples": run.samples(batches),
            "at_iter": run.at_iter,
            "at_first": run.at_first,
            "order": run.order,
            "before": run.before,
            "batches_before": run.batches_before,
            "data_size": self.data_size,
            "data_rank": self.data_rank,
            "geometry": geometry(loader),
        }

    def indices_of(self, batch: int) -> list[int] | None:
        """The samples of a batch of this epoch, counted from 0; None if nobody knows them any more."""
        run = self.passes[-1] if self.passes else None
        found = None if run is None else run.indices_of(batch - run.batches_before)
        return None if found is None else [found] if isinstance(found, int) else list(found)

    def generators(self, loader: Any) -> State:
        """The state of the loader's own generators, which is all that matters between epochs.

        And whether workers run that persist: those are not seeded again.
        """
        return {"kind": "map", "own": own_state(loader), "workers": _compat.has_workers(loader)}

    # -- iterating ------------------------------------------------------------------------------------------------

    @contextmanager
    def iterator_made(self, loader: Any) -> Iterator[None]:
        """Around the making of the loader's iterator."""
        self.prepare()
        _compat.set_sampler_epoch(loader, self.epoch())
        begin, self.pending_begin = self.pending_begin, None
        if begin is not None:
            set_own_state(loader, begin["own"])
        place, self.pending = self.pending, None
        self._place, self._rest = place, None
        self._unseeded = begin is not None and begin["workers"] and loader.persistent_workers
        if place is None:
            self.passes = [*self.passes[-1:], Pass({"torch": torch.get_rng_state(), "own": own_state(loader)})]
            yield
            return
        run = _pass_of(place)
        self.passes = [run]
        keep_seed(loader, run.order)
        if not self._replays(loader, place):
            self._rest, run.dealt = self._dealt(loader, place), True
            run.before += place["samples"] * place["data_size"]
            run.batches_before = max(0, len(loader) - len(self._rest))
        with generators_at(loader, place["at_iter"]):
            yield
        if place["at_first"] is not None:
            # Now, as after the last batch of an epoch nobody asks for another one.
            self._start()

    def indices(self, loader: Any, inner: Any) -> Iterator[Any]:
        """The batches of indices of the pass whose iterator is being made; what was used before is left out."""
        run, unseeded = self.passes[-1], self._unseeded
        steps = self._indices(loader, inner, run, self._place, self._rest, unseeded)
        started: list[None] = []
        self._start = lambda: started.append(next(steps)) if not started else None
        return self._begun(steps, self._start)

    def _begun(self, steps: Iterator[Any], start: Callable[[], None]) -> Iterator[Any]:
        start()
        yield from steps

    def _indices(
        self, loader: Any, inner: Any, run: Pass, place: State | None, rest: list[Any] | None, unseeded: bool
    ) -> Iterator[Any]:
        """Begins with None, when it is where it has to go on."""
        if rest is not None:
            batches = iter(rest)
        elif place is not None and place["at_first"] is not None:
            batches = self._replayed(loader, inner, place, run)
        else:
            if unseeded:
                torch.set_rng_state(run.at_iter["torch"])
                set_own_state(loader, run.at_iter["own"])
            run.at_first = {**host_random_state(), "own": own_state(loader)}
            run.order = describe_order(loader, self.data_size)
            batches = iter(inner)
        yield None
        yield from self._noted(run, batches)

    def _noted(self, run: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            run.take(batch)
            yield batch

    def _replays(self, loader: Any, place: State) -> bool:
        """Whether the batch sampler itself can be run again; else the rest is dealt out anew."""
        ranks = (place["data_size"], place["data_rank"]) == (self.data_size, self.data_rank)
        return ranks and place["geometry"] == geometry(loader) and not place["before"]

    def _replayed(self, loader: Any, inner: Any, place: State, run: Pass) -> Iterator[Any]:
        """Run the batch sampler from where it began, and drop what was used."""
        first: list[Any] = []
        with generators_at(loader, place["at_first"]):
            batches = iter(inner)
            dropped = list(itertools.islice(batches, place["batches"]))
            if not dropped:
                # What a sampler draws when it starts, it draws with the first batch.
                first = list(itertools.islice(batches, 1))
        for batch in dropped:
            run.take(batch)
        if run.given != place["batches"] or run.digest(run.given) != place["digest"]:
            raise CheckpointError(
                f"{_name(loader)} gives other batches than before the checkpoint, so its place in the epoch is lost: "
                f"{_what_decides(loader)} depends on more than its generators, its state_dict and the epoch, or the "
                f"dataset is another one. {RESTART_INSTEAD}"
            )
        return itertools.chain(first, batches)

    def _dealt(self, loader: Any, place: State) -> list[Any]:
        """This rank's batches of what is left of the order of all ranks."""
        problem = self.cannot_deal(loader, place)
        if problem:
            raise checkpoint_error("a place in an epoch cannot be found again", [problem])
        order = rebuild_order(loader, place)
        consumed = place["before"] + place["samples"] * place["data_size"]
        sampler = sampler_of(loader)
        drop_last = isinstance(sampler, DistributedSampler) and sampler.drop_last
        indices = remaining_samples(
            order, consumed, num_replicas=self.data_size, rank=self.data_rank, drop_last=drop_last
        )
        if loader.batch_sampler is None:
            return indices
        return list(BatchSampler(indices, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last))

    @property
    def dealt_at(self) -> int | None:
        """How many batches what was used before counts as, where the rest was dealt out anew; else None."""
        return self.passes[-1].batches_before if self.passes and self.passes[-1].dealt else None

    def why_not(self, loader: Any, place: State, *, trying: bool = False) -> Problem | None:
        """Why the loader cannot go to a place, or None if it can; only when `trying` are samplers run to find out."""
        if not self._replays(loader, place):
            return self.cannot_deal(loader, place)
        if trying and place["at_first"] is not None:
            own = own_state(loader)
            try:
                self._replayed(loader, _compat.index_sampler(loader), place, Pass(place["at_iter"]))
            except CheckpointError as error:
                return Problem(str(error))
            finally:
                set_own_state(loader, own)
        return None

    def cannot_deal(self, loader: Any, place: State) -> Problem | None:
        """Why the rest of an epoch cannot be dealt out anew, or None if it can."""
        was, now = place["geometry"], geometry(loader)
        if was["length"] != now["length"]:
            return Problem(
                f"{_name(loader)} had {was['length']} samples and has {now['length']} now",
                f"resume with the same dataset. {RESTART_INSTEAD}",
            )
        if place["order"] is None or describe_order(loader, self.data_size) is None:
            return Problem(
                f"{_name(loader)} had {place['data_size']} data ranks and batches of {was['batch_size']}, and has "
                f"{self.data_size} and {now['batch_size']} now; {_what_decides(loader)} deals out the samples in a way "
                "of its own",
                f"resume with {place['data_size']} data ranks and the same batches. {RESTART_INSTEAD}",
            )
        return None


def _pass_of(place: State) -> Pass:
    """The pass in which the place is."""
    run = Pass(place["at_iter"])
    run.at_first, run.order = place["at_first"], place["order"]
    run.before, run.batches_before = place["before"], place["batches_before"]
    return run


def _name(loader: Any) -> str:
    return f"{type(loader).__name__}({type(loader.dataset).__name__})"


def _what_decides(loader: Any) -> str:
    return type(sampler_of(loader) if has_plain_batches(loader) else loader.batch_sampler).__name__


# -- views of loaders -------------------------------------------------------------------------------------------------


class _Indices:
    """A batch sampler that is followed."""

    def __init__(self, follower: Follower, loader: Any, inner: Any) -> None:
        self._follower, self._loader, self._inner = follower, loader, inner

    def __iter__(self) -> Iterator[Any]:
        return self._follower.indices(self._loader, self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class Followed:
    """What `follow` puts before the class of a loader."""

    follower: Follower

    @property
    def _index_sampler(self) -> Any:
        return _Indices(self.follower, self, _compat.index_sampler(self))

    def __iter__(self) -> Any:
        _compat.use_index_sampler_of(self)
        try:
            with self.follower.iterator_made(self):
                return super().__iter__()  # type: ignore[misc]
        except CheckpointError as error:
            if self.follower.postpone is None:
                raise
            self.follower.postpone(error)
        with self.follower.iterator_made(self):
            return super().__iter__()  # type: ignore[misc]

    # Lightning warns of each loader without these two that it cannot be resumed.

    def state_dict(self) -> State:
        """Nothing: the strategy saves the place itself."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing: the strategy goes to the place itself."""


def can_follow(loader: Any) -> bool:
    """Whether a loader is a map-style `DataLoader` whose batch sampler decides what it yields."""
    return (
        isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not is_stateful(loader)
    )


def follow(loader: Any, follower: Follower) -> Any:
    """Make an object with the class and the attributes of `loader` (the same, not copies) that is followed."""
    cls = type(loader)
    view: Any = object.__new__(type(cls.__name__, (Followed, cls), {"follower": follower}))
    view.__dict__ = loader.__dict__
    return view


class Counted(Followed):
    """A followed loader of a loop that the user writes: it counts its epochs, and the batches that the loop has taken.

    What it counts are iterations; the first one is epoch 0, as in `Fabric.setup_dataloaders`.
    """

    _epoch: int
    _used: int | None

    def __iter__(self) -> Iterator[Any]:
        kind: Any = type(self)
        place = self.follower.pending
        batches = super().__iter__()
        kind._used = self.follower.dealt_at
        if kind._used is None:
            kind._used = 0 if place is None else place["batches"]
        for batch in batches:
            kind._used += 1
            yield batch
        kind._epoch, kind._used = self._epoch + 1, None

    def state_dict(self) -> State:
        """The place of this rank; of the next epoch's begin, once an iteration has come to its end."""
        place = None if self._used is None else self.follower.place(self, self._used)
        return {"epoch": self._epoch, "place": place or self.follower.generators(self)}

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration go on at a place."""
        kind: Any = type(self)
        kind._epoch, kind._used = state["epoch"], None
        place = state["place"]
        self.follower.pending = place if "batches" in place else None
        self.follower.pending_begin = place if "own" in place else None


def count(loader: Any, data_size: int, data_rank: int) -> Any:
    """Make a view of a loader for a loop that the user writes; the loader itself where it cannot be followed."""
    if not can_follow(loader):
        return loader
    cls = type(loader)
    follower = Follower(data_size, data_rank, lambda: kind._epoch)
    kind: Any = type(cls.__name__, (Counted, cls), {"follower": follower, "_epoch": 0, "_used": None})
    view: Any = object.__new__(kind)
    view.__dict__ = loader.__dict__
    return view


def states_of_ranks(loader: Any, group: dist.ProcessGroup) -> State:
    """The state of a loader on each data rank, for a checkpoint of one rank; called on all of them."""
    states: list[Any] = [loader.state_dict()] * group.size()
    if group.size() > 1:
        dist.all_gather_object(states, loader.state_dict(), group=group)
    return {"states_of_data_ranks": states}


def load_states_of_ranks(loader: Any, saved: State, data_size: int, data_rank: int, on_lost_place: OnLostPlace) -> None:
    """Let a loader go on where it was.

    Args:
        loader: What `count` returned, or a loader with a state of its own.
        saved: What `states_of_ranks` gave.
        data_size: Number of data ranks now.
        data_rank: Which of them this is.
        on_lost_place: What to do where that cannot be; a loader with a state of its own stays as it is to start again.

    Raises:
        CheckpointError: If it cannot be.
    """
    states = saved["states_of_data_ranks"]
    same = len(states) == data_size
    state = states[data_rank if same else 0]
    problem: Problem | None = None
    if isinstance(loader, Counted):
        if not same and "batches" not in state["place"]:
            state = {**state, "place": {}}  # Generators of the loader are those of its rank.
        elif "batches" in state["place"]:
            problem = loader.follower.why_not(loader, state["place"], trying=on_lost_place != "error")
    elif not same:
        problem = Problem(
            f"{type(loader).__name__} saved the state of each of {len(states)} data ranks, and here are {data_size}",
            f"resume with {len(states)} data ranks. {RESTART_INSTEAD}",
        )
    if problem is None:
        loader.load_state_dict(state)
    elif on_lost_place == "error":
        raise checkpoint_error("a loader cannot find its place in the epoch again", [problem])
    elif isinstance(loader, Counted):
        loader.load_state_dict({"epoch": state["epoch"], "place": {}})
