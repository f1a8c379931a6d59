"""Copies of the state of training in host memory, to go back to without a checkpoint.

Each rank copies what it holds itself, shards where there are shards: nothing is communicated. The memory is taken once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.errors import Problem
from lightning_par.parallel.accounting import human
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.parallel.shards import to_local

Key = tuple[Any, ...]


@dataclass(eq=False)
class Snapshot:
    """One copy.

    Attributes:
        accepted: How many steps had been accepted.
        extra: What its owner keeps with it.
    """

    accepted: int
    extra: dict[str, Any]
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    numbers: dict[Key, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    copied: Any = None


class SnapshotRing:
    """Keeps the last few copies of modules, optimizers and random state; of this rank, each rank has its own.

    Args:
        modules: By any names: whose parameters and buffers are copied, a module and its averages.
        optimizers: Whose state and hyper-parameters are copied.
        keep: How many copies.
        min_age: How many accepted steps a copy has to be old to be gone back to, where there is one of that age: what
            goes wrong has often begun before it shows.

    Attributes:
        optimizers: Those that were given.

    Example::

        ring = SnapshotRing({"model": model}, [optimizer], keep=2, min_age=20)
        ring.take(accepted=0)
        ...
        ring.go_back(ring.choose(accepted))
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], *, keep: int = 2, min_age: int = 0
    ) -> None:
        self.keep, self.min_age = keep, min_age
        self._modules, self.optimizers = dict(modules), list(optimizers)
        self._snapshots: list[Snapshot] = []
        self._spare: list[dict[Key, Tensor]] = []
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    @property
    def last(self) -> Snapshot:
        """The newest."""
        return self._snapshots[-1]

    def bytes(self) -> int:
        """How large a copy is, or will be once the optimizers have a state, which is estimated where they have none."""
        held = sum(_bytes(to_local(tensor)) for _, tensor in self._state())
        return held + sum(_state_to_come(optimizer) for optimizer in self.optimizers)

    def problems(self, available: int) -> list[Problem]:
        """What is wrong if no more than so many bytes of host memory may be used, with the numbers."""
        one = self.bytes()
        if one * self.keep <= available:
            return []
        fits = available // max(one, 1)
        return [
            Problem(
                f"{self.keep} snapshots of {human(one)} each take {human(one * self.keep)} of host memory on this "
                f"rank, and {human(available)} may be used: its share of half of what is free",
                f"keep_snapshots={fits}" if fits > 0 else "snapshot_every_n_steps=None, which keeps none",
                f"keep_snapshots: {fits}" if fits > 0 else "snapshot_every_n_steps: null",
            )
        ]

    @torch.no_grad()
    def take(
        self, accepted: int, extra: Mapping[str, Any] | None = None, random: dict[str, Any] | None = None
    ) -> Snapshot:
        """Copy the state as it is; parameters must be sharded again if they are shards.

        On an accelerator the copies are made while the next step begins: call `wait` before it changes parameters.

        Args:
            accepted: How many steps have been accepted.
            extra: What to keep with it; it is copied.
            random: The random state to go back to, if it is not the one of now.
        """
        if len(self._snapshots) >= self.keep:
            self._spare.append(self._snapshots.pop(self._superfluous(accepted)).tensors)
        spare = self._spare.pop() if self._spare else {}
        kept = copy.deepcopy(dict(extra or {}), self._not_copied())
        snapshot = Snapshot(accepted, kept, random=random or random_state())
        # The next forward changes buffers, before anybody waits.
        self._copy(self._buffers(), snapshot, spare)
        with self._beside() as record:
            self._copy(self._stepped(), snapshot, spare)
            snapshot.copied = record()
        snapshot.numbers = {key: copy.deepcopy(value, self._not_copied()) for key, value in self._plain()}
        self._snapshots.append(snapshot)
        return snapshot

    def _copy(self, tensors: Iterator[tuple[Key, Tensor]], snapshot: Snapshot, spare: dict[Key, Tensor]) -> None:
        for key, tensor in tensors:
            local = to_local(tensor)
            host = spare.get(key)
            if host is None or host.shape != local.shape or host.dtype != local.dtype:
                host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            snapshot.tensors[key] = host.copy_(local, non_blocking=True)

    def _not_copied(self) -> dict[int, Any]:
        """A memo for `copy.deepcopy`: schedulers may hold their optimizer, and that has its parameters for keys."""
        keys = (key for optimizer in self.optimizers for key in optimizer.state)
        return {id(one): one for one in [*self.optimizers, *keys]}

    def wait(self) -> None:
        """Let what is computed from now on wait for the copies."""
        if self._snapshots and self._snapshots[-1].copied is not None:
            torch.cuda.current_stream().wait_event(self._snapshots[-1].copied)

    def choose(self, accepted: int) -> Snapshot:
        """The newest snapshot that is old enough when so many steps have been accepted, or else the oldest."""
        old = [snapshot for snapshot in self._snapshots if accepted - snapshot.accepted >= self.min_age]
        return old[-1] if old else self._snapshots[0]

    @torch.no_grad()
    def go_back(self, snapshot: Snapshot) -> None:
        """Restore a snapshot; later ones are forgotten.

        Values are copied into the tensors that are there; gradients are removed. Parameter groups and buffers that are
        there since then stay.

        Raises:
            RuntimeError: If the modules have other parameters than then, or optimizers have lost their state; nothing
                is changed.
        """
        self._refuse_if_changed(snapshot)
        later = self._snapshots.index(snapshot) + 1
        self._spare += [one.tensors for one in self._snapshots[later:]]
        del self._snapshots[later:]
        if snapshot.copied is not None:
            snapshot.copied.synchronize()
        for number, optimizer in enumerate(self.optimizers):
            self._restore_optimizer(snapshot, number, optimizer)
            optimizer.zero_grad(set_to_none=True)
        for key, tensor in self._state():
            if key in snapshot.tensors:
                put_back(to_local(tensor), snapshot.tensors[key])
        set_random_state(snapshot.random)

    def _refuse_if_changed(self, snapshot: Snapshot) -> None:
        here, then = {key for key, _ in self._stepped()}, snapshot.tensors.keys()
        names = {key[2] for key in here ^ then if key[0] == "parameter"}
        if names:
            what = f"parameters of the module have come or gone since (such as {min(names)}), as when it is pruned"
        elif any(isinstance(key[0], int) for key in then - here):
            what = "optimizers have lost their state since, as when they are reset"
        else:
            return
        raise RuntimeError(
            f"a snapshot was taken when {snapshot.accepted} steps had been accepted, and {what}: training cannot go "
            "back behind that"
        )

    def clear(self) -> None:
        """Forget all copies; their memory is used again."""
        self._spare += [snapshot.tensors for snapshot in self._snapshots]
        self._snapshots = []

    def _superfluous(self, accepted: int) -> int:
        """Which snapshot to give up: the oldest, if the next one is old enough too; else the newest."""
        return 0 if self.keep == 1 or accepted - self._snapshots[1].accepted >= self.min_age else -1

    def _restore_optimizer(self, snapshot: Snapshot, number: int, optimizer: Optimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            for name, value in snapshot.numbers.get((number, "group", index), {}).items():
                if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = copy.deepcopy(value)
        params = _parameters(optimizer)
        for param in params:
            numbers: dict[str, Any] | None = snapshot.numbers.get((number, "state", id(param)))
            if numbers is None:
                optimizer.state.pop(param, None)
                continue
            state = optimizer.state[param]
            for name in [name for name in state if (number, "tensor", id(param), name) not in snapshot.tensors]:
                del state[name]
            state.update(copy.deepcopy(numbers, self._not_copied()))
        for key in optimizer.state.keys() - set(params):
            del optimizer.state[key]
        optimizer.state.update(copy.deepcopy(snapshot.numbers[number, "rest"], self._not_copied()))

    def _state(self) -> Iterator[tuple[Key, Tensor]]:
        """All tensors that are copied, under keys that are the same from step to step."""
        yield from self._buffers()
        yield from self._stepped()

    def _buffers(self) -> Iterator[tuple[Key, Tensor]]:
        for label, module in self._modules.items():
            for name, value in module.named_buffers():
                if not value.is_meta:
                    yield ("buffer", label, name), value

    def _stepped(self) -> Iterator[tuple[Key, Tensor]]:
        """What a step changes: parameters and the state of optimizers."""
        for label, module in self._modules.items():
            for name, value in module.named_parameters():
                if not value.is_meta:
                    yield ("parameter", label, name), value
        for number, optimizer in enumerate(self.optimizers):
            for param in _parameters(optimizer):
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        yield (number, "tensor", id(param), name), value

    def _plain(self) -> Iterator[tuple[Key, Any]]:
        """What else the optimizers hold."""
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                yield (number, "group", index), {n: v for n, v in group.items() if n not in ("params", "param_names")}
            params = _parameters(optimizer)
            for param in params:
                state = optimizer.state.get(param)
                rest = None if state is None else {n: v for n, v in state.items() if not isinstance(v, Tensor)}
                yield (number, "state", id(param)), rest
            yield (number, "rest"), {key: optimizer.state[key] for key in optimizer.state.keys() - set(params)}

    @contextmanager
    def _beside(self) -> Iterator[Callable[[], Any]]:
        """Let copies from an accelerator be made on a stream of their own; yields what notes where they end."""
        if not torch.cuda.is_available():
            yield lambda: None
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield self._stream.record_event


def put_back(tensor: Tensor, kept: Tensor) -> None:
    """Copy back what was kept of a tensor, also where it has another shape since, or elements that share memory."""
    shares = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.shape == kept.shape and not shares:
        tensor.copy_(kept)
    else:
        tensor.data = kept.to(tensor.device, tensor.dtype, copy=True)


def host_memory(ranks_here: int, part: float = 0.5) -> int:
    """The bytes that one rank may use: its share of a part of the memory that is free on its node (Linux).

    Args:
        ranks_here: Ranks on this node.
        part: Of the free memory.
    """
    file = Path("/proc/meminfo")
    if file.exists():
        lines = file.read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(free * part) // ranks_here


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_to_come(optimizer: Optimizer) -> int:
    """Two numbers for each parameter that has no state yet, as most have; for SGD one, with momentum."""
    each = 2
    if isinstance(optimizer, torch.optim.SGD):
        each = 1 if any(group.get("momentum") for group in optimizer.param_groups) else 0
    without = (param for param in _parameters(optimizer) if not optimizer.state.get(param))
    return each * sum(_bytes(to_local(param)) for param in without)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.device.type != "meta" else 0
