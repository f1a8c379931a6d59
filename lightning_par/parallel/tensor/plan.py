"""What is done to the Linears of one block, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
class SequenceEntry:
    """Where the whole sequence is put together from the slices of the ranks.

    Attributes:
        module: The module's name in the block.
        inputs: Positions and keywords of its arguments that are slices.
        group: The divided group that begins there: it ends in a sum that leaves each rank its slice again. -1: the
            module runs alike on all ranks, which then cut its output.
    """

    module: str
    inputs: tuple[int | str, ...]
    group: int = -1


@dataclass(frozen=True)
class SequencePlan:
    """How a block computes with a slice of the sequence on each rank (Korthikanti et al. 2022, arXiv:2205.05198).

    Attributes:
        dim: The dimension of the hidden state, the block's first tensor argument, that is the sequence.
        entries: Where it is whole. A group that is not named is entered at its Linears, or lies in a module that is
            whole.
        whole_inputs: Columns whose input is whole as it is, such as that of keys in cross-attention.
        partial_gradients: Replicated parameters of which each rank has only a part of the gradient; it includes those
            of the plan.
        random: Whether the block draws random numbers in training.
    """

    dim: int
    entries: tuple[SequenceEntry, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    partial_gradients: tuple[str, ...] = ()
    random: bool = False

    def entry_of(self, group: int) -> SequenceEntry | None:
        """The entry of a group at a module, if it has one."""
        return next((entry for entry in self.entries if entry.group == group), None)

    def is_whole(self, module: str) -> bool:
        """Whether a module lies in one that all ranks run alike."""
        return any(f"{module}.".startswith(f"{entry.module}.") for entry in self.entries if entry.group == -1)


@dataclass(frozen=True)
class BlockTensorPlan:
    """How one block is divided over `tp_size` ranks.

    Attributes:
        tp_size: Number of ranks.
        modules: One entry for each module that holds parameters.
        patches: Attributes to change.
        partial_gradients: Replicated parameters of which each rank has only a part of the gradient.
        random_groups: Groups in which random numbers are drawn in training, for its own features on each rank.
        sequence: How it computes with slices of the sequence, if that was asked for and can be done.
        sequence_refused: Why it cannot.
        verified: How it was compared with the undivided block, and with which error.
    """

    tp_size: int
    modules: tuple[ModulePlan, ...]
    patches: tuple[AttributePatch, ...] = ()
    partial_gradients: tuple[str, ...] = ()
    random_groups: tuple[int, ...] = ()
    sequence: SequencePlan | None = None
    sequence_refused: str = ""
    verified: str = ""

    def __getitem__(self, name: str) -> ModulePlan:
        return next(module for module in self.modules if module.name == name)

    @property
    def sharded_share(self) -> float:
        """The part of the block's parameters that is divided, 0 to 1."""
        divided = sum(module.numel for module in self.modules if module.style != "replicate")
        return divided / max(1, sum(module.numel for module in self.modules))

    def report(self) -> str:
        """Describe the plan, one line a module."""
        lines = [f"tp {self.tp_size}: {self.sharded_share:.1%} of the parameters divided; {self.verified}"]
        for module in self.modules:
            parts = f" {list(module.parts)}" if module.parts else ""
            reason = f": {module.reason}" if module.reason else ""
            lines.append(f"  {module.name or '(block)'}: {module.style}{parts}{reason}")
        lines += [f"  {patch.module or '(block)'}.{patch.attribute} = {patch.value}" for patch in self.patches]
        partial = self.sequence.partial_gradients if self.sequence else self.partial_gradients
        lines += [f"  {name}: gradient summed over tp" for name in partial]
        if self.sequence:
            lines.append(f"  slices of the sequence (dimension {self.sequence.dim})")
            lines += [f"  {entry.module}: on the whole sequence" for entry in self.sequence.entries]
        elif self.sequence_refused:
            lines.append(f"  no slices of the sequence: {self.sequence_refused}")
        return "\n".join(lines)
