"""Every private API of torch that `resilience/` uses, in one place; `tests/test_compat.py` tells what breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

RECENT = 16  # collectives of each group that are told


def own_connection() -> dist.Store | None:  # type: ignore[name-defined]
    """Make a second connection to the store of the default process group (`_get_default_store`, `clone`; torch 2.13).

    None where that cannot be had: what uses it works for one process then.
    """
    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.clone() if hasattr(store, "clone") else None


def flight_records() -> list[str]:
    """What torch's flight recorder knows about the collectives of this process, as JSON texts.

    Empty where torch has none (`_dump_fr_trace_json`, torch 2.13; `_dump_nccl_trace_json` with NCCL) or keeps nothing
    (`TORCH_FR_BUFFER_SIZE=0`).
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    texts = []
    for dump in dumps:
        if dump is not None:
            text = dump(includeCollectives=True, onlyActive=False)
            texts.append(text.decode() if isinstance(text, bytes) else text)
    return texts


def collectives(records: list[str]) -> list[dict[str, Any]]:
    """The last collectives of each process group.

    What is sent from one rank to another is left out: ranks count it differently, and gloo does not record it. For the
    same reason the numbers of the group's status (``pg_status``) are of no use.

    Args:
        records: Of `flight_records`.

    Returns:
        For each group its ``name`` (the same on its ranks), ``about``, ``ranks``, the number of the collective that was
        called last (``called``) and of the one that was last over (``over``), and of the last ones by number, as text,
        ``calls`` (``{"4": "all_reduce [3] Float"}``).
    """
    groups: dict[str, dict[str, Any]] = {}
    for record in map(json.loads, records):
        for entry in record.get("entries", []):
            if entry.get("is_p2p"):
                continue
            name, about = entry["process_group"]
            # A group that was destroyed is remembered too, and its name may be given again.
            if name not in groups or groups[name]["id"] != entry["pg_id"]:
                groups[name] = {"id": entry["pg_id"], "name": name, "about": about, "ranks": _ranks_of(name)}
                groups[name] |= {"called": 0, "over": 0, "calls": {}}
            group, number = groups[name], int(entry["collective_seq_id"])
            group["called"] = max(group["called"], number)
            if entry["retired"] or entry["state"] == "completed":
                group["over"] = max(group["over"], number)
            group["calls"][str(number)] = _call(entry)
    for group in groups.values():
        group["calls"] = dict(list(group["calls"].items())[-RECENT:])
    return list(groups.values())


def _call(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    # Of the others ranks may give and get different shapes.
    if operation not in ("all_reduce", "allreduce", "broadcast"):
        return str(operation)
    shapes = " ".join(str(size) for size in entry.get("input_sizes", []))
    return f"{operation} {shapes} {' '.join(sorted(set(entry.get('input_dtypes', []))))}".strip()


def _ranks_of(name: str) -> list[int] | None:
    """The global ranks of a process group (`_world.pg_names` and `pg_group_ranks`, torch 2.13)."""
    world = distributed_c10d._world
    for group, known in list(world.pg_names.items()):
        if known == name:
            return sorted(world.pg_group_ranks.get(group, ())) or None
    return None


def around_waits(before: Callable[[], Any], after: Callable[[Any], None]) -> Callable[[], None]:
    """Be told of each wait for a collective: before it, and after it with what `before` returned.

    Collectives of `torch.distributed` wait in `Work.wait`, also those that look synchronous (torch >= 2.0); it is
    replaced on the class. On CUDA it lets the current stream wait, as do events (FSDP2) and other streams there.

    Returns:
        Puts torch's own methods back.
    """
    owners: list[tuple[Any, str]] = [(dist.Work, "wait")] if dist.is_available() else []
    if torch.cuda.is_available():
        owners += [(torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream")]
    undo = [_wrap(owner, name, before, after) for owner, name in owners]

    def put_back() -> None:
        for one in reversed(undo):
            one()

    return put_back


def _wrap(owner: Any, name: str, before: Callable[[], Any], after: Callable[[Any], None]) -> Callable[[], None]:
    original = getattr(owner, name)
    on_cuda = torch.cuda.is_available()

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Another stream's wait does not hold up the computation, and what a graph records does not happen now.
        elsewhere = name != "wait" and self != torch.cuda.current_stream()
        if elsewhere or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return original(self, *args, **kwargs)
        token = before()
        try:
            return original(self, *args, **kwargs)
        finally:
            after(token)

    setattr(owner, name, waiting)

    def put_back() -> None:
        # Whoever replaced it later puts this one back itself.
        if getattr(owner, name) is waiting:
            setattr(owner, name, original)

    return put_back
