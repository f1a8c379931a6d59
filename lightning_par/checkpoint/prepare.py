"""The first half of a save, while training waits: who writes which part of which tensor, and copies of what changes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.manifest import FORMAT, META, rank_file
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.state import refuse_dtensors
from lightning_par.checkpoint.storage import Storage
from lightning_par.checkpoint.writer import ShardWriter


@dataclass(frozen=True)
class Content:
    """What one rank gives to a checkpoint.

    Attributes:
        tensors: By their name in the checkpoint. Those that are not DTensors are equal on all ranks that have them.
        record: Everything else of the optimizers and the model, and the caller's mapping; what rank 0 has is stored,
            with the parts that only other stages of a pipeline have.
        stage: What tells the stages of a pipeline apart, alike on all ranks of one.
        rank_state: What each rank stores for itself: plain types and tensors.
    """

    tensors: Mapping[str, Any]
    record: Mapping[str, Any]
    stage: Any
    rank_state: Mapping[str, Any]


@dataclass
class Prepared:
    """What `commit` writes.

    Attributes:
        plan: The parts of tensors that this rank writes.
        metadata: The index of all tensors, on the first rank.
        data: Gives the values of the parts.
        writer: Writes them.
        files: The other files of this rank, by their name in the checkpoint.
    """

    plan: SavePlan
    metadata: Metadata | None
    data: SavePlanner
    writer: ShardWriter
    files: dict[str, bytes]


class HostBuffers:
    """Copies of tensors on the host, in memory that is allocated once (page-locked where there is an accelerator)."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self._events: list[Any] = []

    def copy(self, items: Sequence[WriteItem], data: SavePlanner) -> SavePlanner:
        """Copy what a plan writes.

        Copies from an accelerator are ordered before everything that its current stream does later, such as the
        optimizer's next step; `wait` waits for them.

        Returns:
            What gives the copies.
        """
        former, self._buffers = self._buffers, {}
        devices: set[torch.device] = set()
        for item in items:
            value: Any = data.resolve_data(item)
            if not isinstance(value, Tensor):
                continue
            value = value.detach()
            buffer = former.get(item.index)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
            buffer.copy_(value, non_blocking=True)
            self._buffers[item.index] = buffer
            devices.add(value.device)
        self._events = []
        for device in devices:
            if device.type != "cpu":
                event = torch.Event(device)
                event.record()
                self._events.append(event)
        return _Copies(self._buffers, data)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self._events:
            event.synchronize()


class _Copies(DefaultSavePlanner):
    """Gives copies in the place of tensors."""

    def __init__(self, copies: Mapping[MetadataIndex, Tensor], data: SavePlanner) -> None:
        super().__init__()
        self._copies = copies
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        copy = self._copies.get(write_item.index)
        return self._data.resolve_data(write_item) if copy is None else copy


class Planning:
    """Agrees on who writes what, and remembers it: the plans of large models take long to exchange."""

    def __init__(self) -> None:
        self._known: tuple[SavePlan, SavePlan, Metadata | None] | None = None

    def plan(self, tensors: Mapping[str, Any], writer: ShardWriter, ranks: Ranks) -> tuple[SavePlan, Any, SavePlanner]:
        """Plan a save; collective.

        Returns:
            The plan of this rank, the index of all tensors on the first one, and what gives the values.
        """
        # Of values that several ranks hold, the lowest one's are stored: buffers that drifted apart stay consistent.
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
        failure = "cannot plan the checkpoint"
        same = ranks.gather(failure, lambda: self._matches(planner.create_local_plan()))
        local = planner.plan
        if self._known is not None and all(same):
            _, final, metadata = self._known
            return planner.finish_plan(final), metadata, planner
        plans: list[Any] = [None] * ranks.size
        if ranks.alone:
            plans = [local]
        else:
            dist.gather_object(local, plans if ranks.rank == 0 else None, group=ranks.group, group_dst=0)

        def agree() -> tuple[list[SavePlan], Metadata | None]:
            if ranks.rank != 0:
                return [], None
            finals, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(finals), metadata

        finals, metadata = ranks.together(failure, agree)
        mine: list[Any] = [None]
        if ranks.alone:
            mine = finals
        else:
            dist.scatter_object_list(mine, finals if ranks.rank == 0 else None, group=ranks.group, group_src=0)
        self._known = local, mine[0], metadata
        return planner.finish_plan(mine[0]), metadata, planner

    def _matches(self, local: SavePlan) -> bool:
        return self._known is not None and self._known[0] == local


def prepare(
    content: Content,
    storage: Storage,
    ranks: Ranks,
    planning: Planning | None = None,
    buffers: HostBuffers | None = None,
) -> Prepared:
    """Do what needs the values as they are now; collective.

    Args:
        content: What is saved.
        storage: Where to.
        ranks: Those that save together.
        planning: Remembers the plan for the next save.
        buffers: Take copies, so that training can go on while they are written. Otherwise the tensors themselves are
            written.

    Raises:
        CheckpointError: On all ranks, if something cannot be stored.
    """
    ranks.together("cannot write the checkpoint", lambda: refuse_dtensors(content.record, f"the content of {META}"))
    writer = ShardWriter(storage, "", ranks.rank)
    plan, metadata, data = (planning or Planning()).plan(content.tensors, writer, ranks)
    whole = _with_other_stages(content.record, content.stage, ranks)
    whole = {"format": FORMAT, "world_size": ranks.size, **whole}

    def serialise() -> tuple[dict[str, bytes], SavePlanner]:
        files = {rank_file(ranks.rank): _bytes_of(dict(content.rank_state))}
        if ranks.rank == 0:
            files[META] = _bytes_of(whole)
        return files, data if buffers is None else buffers.copy(plan.items, data)

    files, data = ranks.together("cannot write the checkpoint", serialise)
    return Prepared(plan, metadata, data, writer, files)


def _bytes_of(value: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as e:
        raise CheckpointError(f"{_unsavable(value)} cannot be saved: {type(e).__name__}: {e}") from e
    return stream.getvalue()


def _unsavable(value: Any) -> str:
    """Where in nested mappings that is which cannot be pickled."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        try:
            torch.save(item, io.BytesIO())
        except Exception:
            inside = _unsavable(item)
            return f"{key}/{inside}" if isinstance(item, Mapping) and inside else str(key)
    return ""


def _with_other_stages(record: Mapping[str, Any], part: Any, ranks: Ranks) -> Mapping[str, Any]:
    """On the first rank, the record with what only other stages of a pipeline have."""
    digest = hashlib.sha256(repr(part).encode()).hexdigest()
    digests = ranks.gather("cannot compare the stages", lambda: digest)
    if len(set(digests)) == 1:
        return record
    # Of many ranks of a stage one is enough.
    mine = record if digests.index(digest) == ranks.rank else None
    told = ranks.gather_to_first("cannot gather the stages", lambda: mine)
    records = [one for one in told if one is not None]
    if ranks.rank != 0:
        return record
    model_values = {name: value for one in records for name, value in one["model_values"].items()}
    optimizers = [
        optimizer
        | {
            key: {n: v for one in records for n, v in one["optimizers"][i][key].items()}
            for key in ("tensors", "values")
        }
        for i, optimizer in enumerate(record["optimizers"])
    ]
    return {**record, "model_values": model_values, "optimizers": optimizers}
