"""What is done to the Linears of one block, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_par.errors import Problem

Style = Literal["column", "row", "fused column", "gather", "replicate"]


@dataclass(frozen=True)
class ModulePlan:
    """What happens to the parameters that one module holds itself.

    Attributes:
        name: The module's name in the block; "" is the block.
        style: "column": each rank has a slice of the output features. "row": of the input features. "fused column": of
            each part of the output features. "gather": of the output features, which are gathered at once, so that
            memory is saved and no work. "replicate": everything.
        numel: Number of parameters, before they are divided.
        parts: Sizes of the parts of a fused column's output features, in order.
        transposed: Whether the weight is (in, out).
        group: Modules with the same number are divided together; -1: replicated.
        reason: Why it is not divided, or only in memory.
    """

    name: str
    style: Style
    numel: int
    parts: tuple[int, ...] = ()
    transposed: bool = False
    group: int = -1
    reason: str = ""


@dataclass(frozen=True)
class AttributePatch:
    """A number that a module's forward reads, and its value on each rank.

    Attributes:
        module: The module's name in the block; "" is the block.
        attribute: Name of the attribute; "config.num_heads" is one of an object that the module holds.
        value: What it becomes.
    """

    module: str
    attribute: str
    value: int


@dataclass(frozen=True)
class BlockTensorPlan:
    """How one block is divided over `tp_size` ranks.

    Attributes:
        tp_size: Number of ranks.
        modules: One entry for each module that holds parameters.
        patches: Attributes to change.
        partial_gradients: Replicated parameters of which each rank has only a part of the gradient.
        verified: How it was compared with the undivided block, and with which error.
        misfits: Sizes that `tp_size` does not divide, so that what nobody asked to be otherwise is not computed with
            slices; each with the sizes that would do.
    """

    tp_size: int
    modules: tuple[ModulePlan, ...]
    patches: tuple[AttributePatch, ...] = ()
    partial_gradients: tuple[str, ...] = ()
    verified: str = ""
    misfits: tuple[Problem, ...] = ()

    def __getitem__(self, name: str) -> ModulePlan:
        return next(module for module in self.modules if module.name == name)

    @property
    def divided_numel(self) -> int:
        """Parameters of the block that are divided."""
        return sum(module.numel for module in self.modules if module.style != "replicate")

    @property
    def sharded_share(self) -> float:
        """The part of the block's parameters that is divided, 0 to 1."""
        return self.divided_numel / max(1, sum(module.numel for module in self.modules))

    def report(self) -> str:
        """Describe the plan, one line for the modules that are treated alike."""
        lines = [f"{self.sharded_share:.1%} of the parameters divided over tp {self.tp_size}; {self.verified}"]
        alike: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for module in self.modules:
            alike.setdefault((module.style, module.parts, module.reason), []).append(module.name or "(block)")
        for (style, parts, reason), names in alike.items():
            of_parts = f" {list(parts)}" if parts else ""
            why = f" ({reason})" if reason else ""
            lines.append(f"  {style}{of_parts}: {', '.join(names)}{why}")
        lines += [f"  {patch.module or '(block)'}.{patch.attribute} = {patch.value}" for patch in self.patches]
        if self.partial_gradients:
            lines.append(f"  gradients summed over tp: {', '.join(self.partial_gradients)}")
        return "\n".join(lines)
