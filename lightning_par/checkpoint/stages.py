"""What the ranks of a pipeline tell each other when they save and load: each has a part of the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.checkpoint.errors import CheckpointMismatch, checkpoint_error
from lightning_par.errors import Problem
from lightning_par.parallel import _compat
from lightning_par.parallel.stages import Stages

_K = TypeVar("_K")
_T = TypeVar("_T")

Groups = list[list[str]]


def on_all_stages(stages: Stages | None, action: Callable[[], _T]) -> list[_T]:
    """Run an action on each stage; all of them get what it has returned on each, or fail if it has failed on one.

    Without a pipeline this rank is the only stage.
    """
    if stages is None:
        return [action()]
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # the other stages wait
        failure = error
    told: list[Any] = [None] * stages.group.size()
    mine = (result, None if failure is None else f"{type(failure).__name__}: {failure}")
    dist.all_gather_object(told, mine, group=stages.group)
    if failure is not None:
        raise failure
    failed = [Problem(f"rank {rank} of the pipeline: {text}") for rank, (_, text) in enumerate(told) if text]
    if failed:
        raise checkpoint_error("another stage of the pipeline failed", failed)
    return [value for value, _ in told]


def union(lists: Iterable[Iterable[_T]]) -> list[_T]:
    """Everything that is in one of several lists, once."""
    return list(dict.fromkeys(item for one in lists for item in one))


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names in the order of the undivided module; those that it does not know come last."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def merge_groups(
    label: str, groups: Sequence[Groups], order: Sequence[str], noted: Groups | None = None
) -> tuple[Groups, bool]:
    """Put together the parameter groups that one optimizer has on each stage.

    Args:
        label: Names the optimizer.
        groups: By stage and group the names of the parameters.
        order: That of the undivided module.
        noted: The groups of an optimizer of the undivided module, where one was seen.

    Returns:
        The groups of an optimizer of the undivided module, and whether the order in them is known: it is where it was
        noted, or all stages list their parameters in the order of the module, or all in the reverse one.

    Raises:
        CheckpointError: If the stages have different numbers of groups.
    """
    if len(groups) == 1:
        return groups[0], True
    if len({len(one) for one in groups}) > 1:
        raise CheckpointMismatch(
            f"{label} has {', '.join(str(len(one)) for one in groups)} parameter groups on the stages of the pipeline, "
            "and which of them belong together cannot be told: keep a group whose parameters are all on other stages, "
            "with an empty list"
        )
    merged: Groups = []
    is_known = True
    for i, parts in enumerate(zip(*groups, strict=True)):
        forth = in_order(union(parts), order)
        ways = [forth, forth[::-1]]
        if noted and len(noted) == len(groups[0]) and set(noted[i]) == set(forth):
            ways.insert(0, noted[i])
        fitting = [way for way in ways if all(_follows(part, way) for part in parts)]
        is_known = is_known and bool(fitting)
        merged.append((fitting or ways)[0])
    return merged, is_known


def from_last_stage(stages: Stages, state: dict[str, Any], parameters: Iterable[str]) -> dict[str, Any]:
    """Replace what several stages have and is no parameter by what the last one has: there steps run to their end."""
    own = set(parameters)
    beside = [name for name in state if name not in own]
    lists = on_all_stages(stages, lambda: beside)
    others = set(union(names for rank, names in enumerate(lists) if rank != stages.last))
    shared = [name for name in lists[stages.last] if name in others]
    if not shared:
        return state
    is_last = stages.group.rank() == stages.last
    box = [_compat.map_tensors(Tensor.cpu, {name: state[name] for name in shared}) if is_last else None]
    source = dist.get_global_rank(stages.group, stages.last)
    dist.broadcast_object_list(box, source, group=stages.group, device=_device(stages))
    if is_last:
        return state
    found: Any = box[0]
    return {name: _like(value, found[name]) if name in found else value for name, value in state.items()}


def collect(stages: Stages | None, keys: Iterable[_K], make: Callable[[_K], Any]) -> dict[_K, Any]:
    """Bring values of all stages to the first rank of the world, one at a time; collective.

    Args:
        stages: The pipeline; None where this rank is the only stage.
        keys: Of the values that this rank has. Of a value that several stages have, the first one's is taken.
        make: Makes the full value of a key; a collective over the ranks of a stage.

    Returns:
        All values by key, tensors on the CPU; nothing elsewhere.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    here = 0 if stages is None else stages.group.rank()
    collected: dict[_K, Any] = {}
    done: set[_K] = set()
    for stage, stage_keys in enumerate(on_all_stages(stages, lambda: list(keys))):
        for key in stage_keys:
            if key in done:
                continue
            if stage == here:
                value = make(key)
                if is_first:
                    collected[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                elif stages is not None and dist.get_global_rank(stages.group, 0) == 0:
                    _send(stages, value)
            elif is_first and stages is not None:
                collected[key] = _receive(stages, stage)
        done.update(stage_keys)
    return collected


def _send(stages: Stages, value: Any) -> None:
    """Send a value to the first rank of the pipeline; tensors as bytes, as not every backend sends every dtype."""
    is_tensor = isinstance(value, Tensor)
    head = [(value.shape, value.dtype) if is_tensor else value, is_tensor]
    dist.send_object_list(head, group=stages.group, group_dst=0, device=_device(stages))
    if is_tensor and value.numel():
        data = value.to(_device(stages)).contiguous().reshape(-1).view(torch.uint8)
        dist.send(data, group=stages.group, group_dst=0)


def _receive(stages: Stages, rank: int) -> Any:
    head: list[Any] = [None, None]
    dist.recv_object_list(head, group=stages.group, group_src=rank, device=_device(stages))
    value, is_tensor = head
    if not is_tensor:
        return value
    tensor = torch.empty(value[0], dtype=value[1], device=_device(stages))
    if tensor.numel():
        dist.recv(tensor.reshape(-1).view(torch.uint8), group=stages.group, group_src=rank)
    return tensor.cpu()


def _follows(part: Sequence[str], way: Sequence[str]) -> bool:
    members = set(part)
    return list(part) == [name for name in way if name in members]


def _like(value: Any, found: Any) -> Any:
    return found.to(value.device) if isinstance(value, Tensor) and isinstance(found, Tensor) else found


def _device(stages: Stages) -> torch.device:
    return _compat.collective_device(stages.group, torch.device("cpu"))
