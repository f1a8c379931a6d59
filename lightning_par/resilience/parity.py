"""Whether ranks that must hold the same bytes of a parameter do: memory and processors err, rarely and silently.

The parts of a parameter are compared that several ranks hold: all of it under DDP, each shard over the replicas of
HSDP, what tensor parallelism does not divide. FSDP and ZeRO on their own hold nothing twice between steps.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.parallel.fingerprints import Fingerprint

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """A parameter of which not all copies are the same.

    Attributes:
        parameter: Its name.
        ranks: Who differs from most of the copies; all that have one, where no value is in the majority.
        others: Who holds the value of the majority.
    """

    parameter: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]

    def __str__(self) -> str:
        differ = f"{_ranks(self.ranks)} {'differs' if len(self.ranks) == 1 else 'differ'}"
        if not self.others:
            return f"{self.parameter}: {differ}, and no value is held by most of them"
        return f"{self.parameter}: {differ} from {_ranks(self.others)}"


class ParityCheck:
    """Compares the copies of parameters by fingerprints of their bytes.

    Args:
        group: The ranks, all of them; None is the default group.

    Example::

        parity = ParityCheck()
        ...
        if step % 500 == 0 and (found := parity.check(dict(module.named_parameters()))):
            print(*found, sep="\\n")
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._fingerprint = Fingerprint()
        self._held: tuple[list[int], list[list[Key]]] = ([], [])

    def check(self, parameters: Mapping[str, Tensor]) -> list[Difference]:
        """Compare; collective.

        Args:
            parameters: By name, DTensors or plain tensors, those of this rank.

        Returns:
            What differs, the same on all ranks, in the order of the names.
        """
        if not dist.is_initialized() or not parameters:
            return []
        keys = [(name, place_of(parameter)) for name, parameter in parameters.items()]
        mine = torch.stack([self._fingerprint(parameter) for parameter in parameters.values()])
        ranks, told = self._tell(keys, mine)
        copies: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, held, values in zip(ranks, self._held[1], told, strict=True):
            for key, value in zip(held, values, strict=False):
                copies[key][value].append(rank)
        found = (_difference(name, by_value) for (name, _), by_value in sorted(copies.items()))
        return [one for one in found if one is not None]

    def _tell(self, keys: list[Key], mine: Tensor) -> tuple[list[int], list[list[int]]]:
        """The ranks, and the fingerprints of each of them; what they belong to is told again where it has changed."""
        size = dist.get_world_size(self._group)
        about = torch.tensor([zlib.crc32(repr(keys).encode()), len(keys)], device=mine.device)
        abouts = [torch.empty_like(about) for _ in range(size)]
        dist.all_gather(abouts, about, group=self._group)
        crcs, counts = zip(*(one.tolist() for one in abouts), strict=True)
        if list(crcs) != self._held[0]:
            held: list[list[Key]] = [[]] * size
            dist.all_gather_object(held, keys, group=self._group)
            self._held = list(crcs), held
        padded = torch.nn.functional.pad(mine, (0, max(counts) - len(mine)))
        told = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(told, padded, group=self._group)
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return ranks, [one.tolist() for one in told]


def place_of(parameter: Tensor) -> tuple[int, ...]:
    """Which shard of a parameter this rank has: its coordinates in the dimensions of the mesh that divide it."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinates = parameter.device_mesh.get_coordinate() or ()
    placed = zip(coordinates, parameter.placements, strict=False)
    return tuple(coordinate for coordinate, placement in placed if not placement.is_replicate())


def _difference(parameter: str, by_value: Mapping[int, list[int]]) -> Difference | None:
    if len(by_value) < 2:
        return None
    groups = sorted(by_value.values(), key=len, reverse=True)
    everyone = sorted(rank for group in groups for rank in group)
    if 2 * len(groups[0]) <= len(everyone):
        return Difference(parameter, tuple(everyone), ())
    return Difference(parameter, tuple(r for r in everyone if r not in groups[0]), tuple(groups[0]))


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
