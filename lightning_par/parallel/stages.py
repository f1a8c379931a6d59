"""What the ranks of a pipeline note of a module before they divide it: the names of its state, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_NOTE = "_lightning_par_stages"
_GROUPS = "_lightning_par_groups"


@dataclass(frozen=True)
class Stages:
    """A module whose state is divided over the ranks of a pipeline.

    Attributes:
        group: The ranks of the pipeline.
        last: The rank in it of the last stage.
        state: Names of the undivided module's state dict.
        parameters: Names of its parameters; of a tied one the first.
        absent: Names of the modules that only other stages run.
    """

    group: dist.ProcessGroup
    last: int
    state: tuple[str, ...]
    parameters: tuple[str, ...]
    absent: tuple[str, ...]

    def holds(self, name: str) -> bool:
        """Whether a name of the state may be that of something on this rank."""
        return not any(name.startswith(f"{module}.") for module in self.absent)

    def of(self, inside: str, outside: str) -> Stages:
        """The part under one prefix, under another one."""

        def moved(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(outside + name.removeprefix(inside) for name in names if name.startswith(inside))

        return Stages(self.group, self.last, moved(self.state), moved(self.parameters), moved(self.absent))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stages:
        # Process groups cannot be copied, and names do not change.
        return self


def note_stages(module: nn.Module, stages: Stages) -> None:
    """Note how a module is divided, on it and on all its submodules, any of which may be saved alone."""
    for name, child in module.named_modules():
        child.__dict__[_NOTE] = (stages, f"{name}." if name else "")


def stages_of(module: nn.Module) -> Stages | None:
    """How a module, or what it contains, is divided over a pipeline; None where each rank has all of it."""
    found: list[Stages] = []
    outer: list[str] = []
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        if _NOTE in vars(child) and not any(prefix.startswith(one) for one in outer):
            stages, inside = vars(child)[_NOTE]
            outer.append(prefix)
            found.append(stages.of(inside, prefix))
    if not found:
        return None

    def joined(names: Callable[[Stages], tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(name for one in found for name in names(one))

    return Stages(
        found[0].group,
        found[0].last,
        joined(lambda one: one.state),
        joined(lambda one: one.parameters),
        joined(lambda one: one.absent),
    )


def note_groups(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> None:
    """Note the parameters of an optimizer by group, those of other stages too, before they leave it."""
    optimizer.__dict__[_GROUPS] = names


def noted_groups(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """What `note_groups` has noted."""
    return list(vars(optimizer).get(_GROUPS, []))
