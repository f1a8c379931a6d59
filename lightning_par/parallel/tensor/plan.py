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
        vector_numel: How many of them are in vectors; the bias of a row stays whole.
        parts: Sizes of the parts of a fused column's output features, in order.
        transposed: Whether the weight is (in, out).
        group: Modules with the same number are divided together; -1: replicated.
        reason: Why it is not divided, or only in memory.
    """

    name: str
    style: Style
    numel: int
    vector_numel: int = 0
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
        narrowed: Modules, each with its group, whose code reads the width of their input as that of a rank's features:
            they are shown one of that width.
        partial_gradients: Replicated parameters of which each rank has only a part of the gradient.
        random_groups: Groups in which random numbers are drawn in training, for its own features on each rank.
        sequence: How it computes with slices of the sequence, if that was asked for and can be done.
        sequence_refused: Why it cannot.
        verified: How it was compared with the undivided block, and with which error.
        misfits: Sizes that `tp_size` does not divide, so that what nobody asked to be otherwise is not computed with
            slices; each with the sizes that would do.
    """

    tp_size: int
    modules: tuple[ModulePlan, ...]
    patches: tuple[AttributePatch, ...] = ()
    narrowed: tuple[tuple[str, int], ...] = ()
    partial_gradients: tuple[str, ...] = ()
    random_groups: tuple[int, ...] = ()
    sequence: SequencePlan | None = None
    sequence_refused: str = ""
    verified: str = ""
    misfits: tuple[Problem, ...] = ()

    def __getitem__(self, name: str) -> ModulePlan:
        return next(module for module in self.modules if module.name == name)

    @property
    def divided_numel(self) -> int:
        """Parameters of the block that are divided."""
        return sum(
            module.numel - (module.vector_numel if module.style == "row" else 0)
            for module in self.modules
            if module.style != "replicate"
        )

    @property
    def sharded_share(self) -> float:
        """The part of the block's parameters that is divided, 0 to 1."""
        return self.divided_numel / max(1, sum(module.numel for module in self.modules))

    def report(self) -> str:
        """Describe the plan, one line for the modules that are treated alike."""
        lines = [f"{self.sharded_share:.1%} of a block divided over tp {self.tp_size}; {self.verified}"]
        alike: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for module in self.modules:
            alike.setdefault((module.style, module.parts, module.reason), []).append(module.name or "(block)")
        for (style, parts, reason), names in alike.items():
            of_parts = f" {list(parts)}" if parts else ""
            why = f" ({reason})" if reason else ""
            lines.append(f"  {style}{of_parts}: {', '.join(names)}{why}")
        for patch in self.patches:
            was = patch.value * self.tp_size
            lines.append(f"  {patch.module or '(block)'}.{patch.attribute}: {was} -> {patch.value} on each rank")
        lines += [f"  {name} is shown an input 1/{self.tp_size} as wide" for name, _ in self.narrowed]
        partial = self.sequence.partial_gradients if self.sequence else self.partial_gradients
        if partial:
            lines.append(f"  gradients summed over tp: {', '.join(partial)}")
        if self.sequence:
            names = [entry.module or "(block)" for entry in self.sequence.entries]
            inside = f"the whole sequence in {', '.join(names)}" if names else "the whole sequence at the columns"
            lines.append(f"  slices of the sequence (dimension {self.sequence.dim}), {inside}")
        elif self.sequence_refused:
            lines.append(f"  no slices of the sequence: {self.sequence_refused}")
        return "\n".join(lines)
