"""Keeps the data ranks together where their loaders differ: none may run a step that the others do not join.

Training ends each epoch with the rank that has the fewest batches, and says so. Evaluation uses every sample: batches
are cut so that each rank has as many without repeating a sample; where a user's own sampler gives some ranks more, the
others take part in the gathering of parameters without running the user's step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat
from lightning_par.resilience.errors import DesyncError

_UNKNOWN = -1


class DataRanks(int):
    """The number of data ranks in a sampler that Lightning made for this strategy; tells it from a user's own."""


def _gather(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of every data rank; they are few and on the CPU, where the group can do that."""
    mine = torch.tensor(numbers)
    mine = mine.to(_compat.collective_device(group, mine.device))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


# -- the number of batches --------------------------------------------------------------------------------------------


def prepare(
    loader: Any, stage: RunningStage, group: dist.ProcessGroup, *, sharded: bool, allow_empty: bool = False
) -> Any:
    """Make a loader end on all data ranks together. Called on all of them, for each loader of a Trainer.

    Args:
        loader: Any iterable, after a distributed sampler was put into it.
        stage: What it is for.
        group: The data ranks.
        sharded: Whether a forward needs all ranks.
        allow_empty: Whether some ranks may have no batch to evaluate, where parameters are replicated.

    Raises:
        ParallelConfigError: If some ranks have no batch and others have.
    """
    if group.size() == 1:
        return loader
    training = stage == RunningStage.TRAINING
    if not training and stage != RunningStage.PREDICTING:
        spread_evenly(loader)
    own = _length(loader)
    endless = isinstance(getattr(loader, "dataset", None), IterableDataset) or own is None
    lengths = [n for (n,) in _gather([_UNKNOWN if own is None else own], group)]
    if min(lengths) <= 0 < max(lengths) and not (allow_empty and not training and not sharded):
        raise _unequal(stage, f"the data ranks have {lengths} batches", lengths)
    differ = min(lengths) < max(lengths)
    if not training:
        # Where lengths are known, those that differ are dealt with when the evaluation begins: every sample counts.
        agree = sharded and endless and not differ
        return _view(loader, group, stage, agreeing=True) if agree else loader
    if differ:
        rank_zero_warn(
            f"The data ranks have {lengths} training batches. Every epoch ends on all of them after {min(lengths)} "
            "batches, as no rank can train alone; what is left is not used."
        )
    shortest = None if own is None else min(lengths)
    return _view(loader, group, stage, shortest, agreeing=endless) if endless or differ else loader


def _unequal(stage: RunningStage, what: str, lengths: Sequence[int] = ()) -> ParallelConfigError:
    prefix = stage.dataloader_prefix
    fewest = min(lengths, default=0)
    fix = f"limit_{prefix}_batches={fewest}" if fewest > 0 else "give every data rank as many batches"
    if stage != RunningStage.TRAINING:
        fix += "; or strategy='par_ddp', which evaluates any number on each rank"
    return ParallelConfigError(Problem(f"{prefix}_dataloader: {what}, and every step needs all ranks", fix))


class _View:
    """What `_view` puts before the class of a loader."""

    _group: dist.ProcessGroup
    _stage: RunningStage
    _length: int


class _Shortened(_View):
    """As long as the shortest of all ranks."""

    def __len__(self) -> int:
        length: int = super().__len__()  # type: ignore[misc]
        return min(self._length, length)


class _Agreeing(_View):
    """Iterators end on all ranks together.

    The ranks ask each other before every batch but the first, so that a look at one batch on one rank is no collective;
    about the first one they ask when the Trainer begins.
    """

    _begins: bool

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()  # type: ignore[misc]
        begins, type(self)._begins = self._begins, False
        done, end = 0, object()
        while True:
            batch = next(batches, end)
            if begins or done or batch is end:
                having = [n for (n,) in _gather([int(batch is not end)], self._group)]
                if not all(having):
                    self._stop(having, done)
                    return
            yield batch
            done += 1

    def _stop(self, having: list[int], done: int) -> None:
        """End here; `having` tells which ranks have another batch."""
        if not any(having):
            return
        ended = [rank for rank, has in enumerate(having) if not has]
        what = f"data ranks {ended} of {len(having)} have no batch after {done}, the others have more"
        if self._stage != RunningStage.TRAINING or done == 0:
            raise _unequal(self._stage, what, [done])
        rank_zero_warn(f"train_dataloader: {what}. The epoch ends on all ranks, as no rank can train alone.")


class _Iterable:
    """Gives a class and attributes to what has none, such as a generator."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _view(
    loader: Any, group: dist.ProcessGroup, stage: RunningStage, length: int | None = None, *, agreeing: bool
) -> Any:
    """Make an object with the class and the attributes of `loader` (the same, not copies), whose ends are agreed on.

    The loader itself stays as it is: the user may hand it to another Trainer.
    """
    if not hasattr(loader, "__dict__"):
        loader = _Iterable(loader)
    kinds = [kind for kind, wanted in ((_Agreeing, agreeing), (_Shortened, length is not None)) if wanted]
    cls = type(loader)
    members = {"_group": group, "_stage": stage, "_length": length, "_begins": True}
    view: Any = object.__new__(type(cls.__name__, (*kinds, cls), members))
    view.__dict__ = loader.__dict__
    return view


# -- evaluation without repeated samples ------------------------------------------------------------------------------


def spread_evenly(loader: Any) -> None:
    """Let a loader with Lightning's distributed sampler evaluate each sample once, with as many batches on each rank.

    The sampler repeats samples until each rank has as many; on a rank that has a repetition it is the last sample.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or not isinstance(sampler.num_replicas, DataRanks):
        return
    total, ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    repeated = sampler.total_size - total
    if repeated <= 0:
        return
    batches, size = loader.batch_sampler, loader.batch_size
    if type(batches) is BatchSampler and size > 1 and total >= ranks:
        # torch refuses the assignment, since an iterator may be under way; there is none yet.
        object.__setattr__(loader, "batch_sampler", _OnceEach(sampler, size, batches.drop_last))
        return
    rank_zero_warn(
        f"{repeated} of {total} samples are used twice: {ranks} data ranks cannot have as many batches of this "
        "loader otherwise. For exact metrics use a batch_size of 2 or more and no batch sampler of your own, or "
        "Trainer(devices=1)."
    )


class _OnceEach(BatchSampler):
    """The batches of a padded `DistributedSampler` without the padding, and with as many batches."""

    def __iter__(self) -> Iterator[list[int]]:
        sampler: Any = self.sampler
        batches = list(super().__iter__())
        padded = sampler.rank + (sampler.num_samples - 1) * sampler.num_replicas >= len(sampler.dataset)
        if padded and sum(map(len, batches)) == sampler.num_samples:
            batches[-1].pop()
            if not batches[-1]:
                batches[-1].append(batches[-2].pop())
        yield from batches


# -- evaluation with different numbers of batches ---------------------------------------------------------------------


class Turns:
    """Counts the steps of one evaluation, to tell which ones not all data ranks run.

    Args:
        batches: The number of batches of each loader that is run one after the other; infinite where unknown.
        group: The data ranks.
        sharded: Whether a forward needs all ranks.

    Attributes:
        everywhere: Whether each data rank runs at least one step.
        every_loader_everywhere: Whether each is known to run at least one step of each loader.
    """

    def __init__(self, batches: Sequence[int | float], group: dist.ProcessGroup, *, sharded: bool) -> None:
        mine = [n if isinstance(n, int) else _UNKNOWN for n in batches]
        everyone = _gather(mine, group) if group.size() > 1 else [mine]
        self._fewest = [min(n) for n in zip(*everyone, strict=True)]
        self._most = [max(n) for n in zip(*everyone, strict=True)]
        self._mine = mine
        self._loader, self._step = 0, 0
        self._sharded = sharded
        if sharded and self._fewest != self._most and (min(self._fewest) == 0 or _UNKNOWN in mine):
            raise ParallelConfigError(
                Problem(
                    f"the data ranks have {everyone} batches of their loaders to evaluate ({_UNKNOWN}: unknown), and a "
                    "sharded forward needs all of them",
                    "evaluate on fewer devices, or on as many batches on each",
                )
            )
        self.everywhere = all(_UNKNOWN in theirs or sum(theirs) for theirs in everyone)
        self.every_loader_everywhere = min(self._fewest, default=0) > 0

    def begin(self) -> bool:
        """Begin a step. Returns whether some other data rank does not run it."""
        while self._loader < len(self._mine) - 1 and self._step == self._mine[self._loader]:
            self._loader, self._step = self._loader + 1, 0
        self._step += 1
        return self._mine[self._loader] != _UNKNOWN and self._step > self._fewest[self._loader]

    @property
    def together(self) -> bool:
        """Whether all data ranks run the step that was begun last."""
        return self._step <= self._fewest[self._loader]

    def idle(self) -> int:
        """End a step. Returns how many steps the other ranks now run that this one has to join."""
        ended = self._sharded and self._step == self._mine[self._loader]
        return self._most[self._loader] - self._step if ended else 0


def refuse_different_names(names: Sequence[str]) -> None:
    """Compare what all ranks are about to reduce; collective over all of them.

    Raises:
        DesyncError: On all ranks, with the names that only some have logged, and by whom.
    """
    everyone: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    if all(theirs == everyone[0] for theirs in everyone):
        return
    lines = []
    for name in sorted({name for theirs in everyone for name in theirs}):
        by = [rank for rank, theirs in enumerate(everyone) if name in theirs]
        if len(by) < len(everyone):
            others = [rank for rank in range(len(everyone)) if rank not in by]
            lines.append(f"  - {name!r}: logged by ranks {by}, not by {others}")
    raise DesyncError(
        "metrics that are reduced over the ranks (sync_dist=True, or a torchmetrics object) were not logged by all:\n"
        + "\n".join(lines)
        + "\nLog them on every rank, with a value that counts for nothing where there is none, or without sync_dist."
    )


def alone() -> ParallelConfigError:
    """The error of a step that communicates while only some of the data ranks run it."""
    return ParallelConfigError(
        Problem(
            "an evaluation step communicates in a batch that other data ranks do not have, as `self.all_gather` and "
            "`self.log(..., on_step=True, sync_dist=True)` do",
            "give every data rank as many batches (use_distributed_sampler=True does), or communicate in "
            "on_validation_epoch_end (self.log: on_step=False)",
        )
    )


# -- the same data everywhere -----------------------------------------------------------------------------------------


def warn_if_same(batch: Any, stage: RunningStage, group: dist.ProcessGroup) -> None:
    """Warn if all data ranks have the same batch: nobody has sharded the dataset. Called on all of them.

    Lightning puts a distributed sampler into the loader of a map-style dataset, but an iterable one it cannot shard.
    """
    if isinstance(batch, Iterator) or group.size() == 1:
        return  # a step that fetches its batches itself
    digest = _digest(batch)
    if digest and all(theirs == [digest] for theirs in _gather([digest], group)):
        rank_zero_warn(
            f"All {group.size()} data ranks have the same first {stage.dataloader_prefix} batch, so every sample "
            "counts that many times. An IterableDataset has to pick its own part, by "
            "`trainer.strategy.mesh.data_rank` and `data_size`; a map-style dataset needs use_distributed_sampler=True "
            "or a sampler that does it."
        )


def refuse_different(batch: Any, stage: RunningStage, group: dist.ProcessGroup) -> None:
    """Raise if the ranks of a model group have different batches: they compute one step together.

    Raises:
        ParallelConfigError: On each of them, naming the ranks.
    """
    if isinstance(batch, Iterator) or group.size() == 1:
        return
    everyone = _gather([_digest(batch)], group)
    other = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if other:
        ranks = [dist.get_global_rank(group, rank) for rank in (0, *other)]
        raise ParallelConfigError(
            Problem(
                f"ranks {', '.join(map(str, ranks))} compute one step together and have different first "
                f"{stage.dataloader_prefix} batches",
                "let datasets and samplers depend on `trainer.strategy.mesh.data_rank` and on no other rank, and seed "
                "what they draw alike (seed_everything)",
            )
        )


def _digest(batch: Any) -> int:
    """Sum up the content of a batch in a number that differs where the content does; 0 if it has no known content."""
    seen = hashlib.blake2b(digest_size=7)
    return int.from_bytes(seen.digest()) if _feed(seen, batch, 0) else 0


def _feed(seen: Any, data: Any, depth: int) -> bool:
    if isinstance(data, Tensor):
        if data.layout is not torch.strided or not data.numel():
            return False
        seen.update(repr((data.shape, data.dtype)).encode())
        seen.update(data.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return True
    if isinstance(data, str | bytes | int | float):
        seen.update(repr(data).encode())
        return True
    if depth > 8:
        return False
    if isinstance(data, Mapping):
        data = list(data.values())
    elif not isinstance(data, list | tuple):
        data = list(vars(data).values()) if hasattr(data, "__dict__") else []
    found = [_feed(seen, item, depth + 1) for item in data]
    return any(found)
