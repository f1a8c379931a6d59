"""A distributed sampler that finds its place within an epoch again, at any number of data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lightning_par.checkpoint.errors import checkpoint_error
from lightning_par.errors import Problem


def epoch_order(length: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return the order in which all ranks together take the samples of an epoch, as torch's `DistributedSampler` does.

    Args:
        length: Number of samples.
        shuffle: Draw the order from `seed` and `epoch`; else it is ascending.
        seed: The same on all ranks.
        epoch: Counted from 0.
    """
    if not shuffle:
        return list(range(length))
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def remaining_samples(
    order: Sequence[int], consumed: int, *, num_replicas: int, rank: int, drop_last: bool = False
) -> list[int]:
    """Deal what is left of an epoch to its ranks in turns; all get as many.

    Args:
        order: What `epoch_order` gave.
        consumed: How many of them all ranks together have used.
        num_replicas: The ranks that share the rest; any number, whoever used what came before.
        rank: Which of them asks.
        drop_last: Leave out the tail that does not divide; else samples from the begin of the epoch fill it up, as
            in torch's `DistributedSampler`.
    """
    left = list(order[consumed:])
    over = len(left) % num_replicas
    if over and drop_last:
        left = left[: len(left) - over]
    elif over:
        missing = num_replicas - over
        left += (list(order) * -(-missing // len(order)))[:missing]
    return left[rank::num_replicas]


class ResumableSampler(DistributedSampler[int]):
    """A `DistributedSampler` with a place: saved in the middle of an epoch, it goes on there, on any number of ranks.

    A whole epoch has the indices of torch's `DistributedSampler`. The order is a function of seed and epoch alone, and
    the place counts the samples that all ranks together have used: `n` batches of `b` samples on each of `r` ranks are
    the first `n * b * r` of the order. After a resume on other ranks those share what is left of it.

    Loaders with worker processes read ahead of what is trained on. There, `state_dict` has to be told how far the loop
    is; the strategies of this package do so themselves.

    Example::

        sampler = ResumableSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4)
        if resuming:
            sampler.load_state_dict(checkpoint["sampler"])
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                train(batch)
                if time_to_save():
                    save({"sampler": sampler.state_dict(used=(i + 1) * 8)})

    Args:
        dataset: The samples, or how many there are.
        num_replicas: Data ranks that share them.
        rank: Which of them this process is.
        shuffle: Draw a new order in each epoch.
        seed: The same on all ranks.
        drop_last: Leave out the tail that the ranks do not divide; else samples are repeated to fill it up.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        samples: Any = range(dataset) if isinstance(dataset, int) else dataset
        super().__init__(samples, num_replicas, rank, shuffle, seed, drop_last)
        self._length = len(samples)
        self._consumed = 0  # by all ranks before the iteration that runs or comes next
        self._given = 0  # by this rank in it
        self._running = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch; in the one where the sampler is, this changes nothing."""
        if epoch != self.epoch:
            super().set_epoch(epoch)
            self._consumed = self._given = 0
            self._running = False

    def __iter__(self) -> Iterator[int]:
        if self._running:
            # A second look at the same epoch; what a state put before the first one is over.
            self._consumed = 0
        self._running, self._given = True, 0
        order = epoch_order(self._length, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        return self._give(
            remaining_samples(
                order, self._consumed, num_replicas=self.num_replicas, rank=self.rank, drop_last=self.drop_last
            )
        )

    def _give(self, indices: Sequence[int]) -> Iterator[int]:
        for index in indices:
            self._given += 1
            yield index

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """Return the place in the epoch; the same on all ranks if they have used as many samples.

        Args:
            used: How many samples this rank has used since it began to iterate. None means as many as were given out,
                which is right for loaders without worker processes, between two batches.
        """
        return {
            "epoch": self.epoch,
            "consumed": self._consumed + (self._given if used is None else used) * self.num_replicas,
            "length": self._length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` gave on any number of ranks; the next iteration begins there.

        Raises:
            CheckpointError: If the sampler it was taken from had other samples or another order.
        """
        here = {"length": self._length, "shuffle": self.shuffle, "seed": self.seed}
        problems = [
            Problem(f"{name} was {state[name]} and is {value} now", f"{name}={state[name]}")
            for name, value in here.items()
            if state[name] != value
        ]
        if problems:
            raise checkpoint_error("a place in an epoch is one in a certain order of the samples", problems)
        self.epoch = int(state["epoch"])
        self._consumed = int(state["consumed"])
        self._given, self._running = 0, False
