"""The tensor-parallel plan of a whole model: one plan for all blocks that are alike, and its embedding and head."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.parallel.random import random_state_kept
from lightning_par.parallel.tensor.apply import shard_block
from lightning_par.parallel.tensor.examples import (
    Call,
    Example,
    Seen,
    call_with_values,
    first_of_each_kind,
    guessed_call,
    kind_of,
    observe,
)
from lightning_par.parallel.tensor.plan import BlockTensorPlan
from lightning_par.parallel.tensor.propose import Wish, plan_block
from lightning_par.parallel.tensor.sequence import slice_sequence
from lightning_par.parallel.tensor.shrink import fingerprint
from lightning_par.parallel.tensor.trace import is_linear
from lightning_par.parallel.tensor.verify import describe, with_values
from lightning_par.parallel.tensor.vocabulary import divide_vocabulary
from lightning_par.parallel.tensor.vocabulary_plan import VocabularyPlan, plan_vocabulary

TensorStyles = Mapping[str, str]
TensorPlanOption = Literal["auto"] | TensorStyles | Callable[[nn.Module], TensorStyles]

_NO_SLICES = "sequence_parallel=False"

# The words of Hugging Face's plans (`transformers.distributed.tensor_parallel`, 5.24) and what they wish for. None:
# how such a module is treated follows from the Linears beside it, and is found out.
STYLES: dict[str, Wish | None] = {
    "shard": "shard",
    "gather": "gather",
    "replicate": "replicate",
    "colwise": "shard",
    "rowwise": "shard",
    "local_colwise": "shard",
    "local_rowwise": "shard",
    "packed_colwise": "shard",
    "packed_rowwise": "shard",
    "local_packed_rowwise": "shard",
    "embedding_rowwise": "shard",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "rowwise_rep": "gather",
    "rowwise_split_input": "gather",
    "replicated_with_grad_allreduce": None,
    "sequence_parallel": None,
}


@dataclass(frozen=True)
class ModelTensorPlan:
    """How a model is divided over `tp_size` ranks; plain data that does not depend on the rank.

    Attributes:
        tp_size: Number of ranks.
        blocks: Names of all blocks, in the order of registration.
        families: Names of blocks that are alike, with their plan.
        vocabulary: The plan of embedding and head.
        total_numel: Parameters of the model.
        source: Where the example came from with which the plan was proven.
    """

    tp_size: int
    blocks: tuple[str, ...]
    families: tuple[tuple[tuple[str, ...], BlockTensorPlan], ...]
    vocabulary: VocabularyPlan
    total_numel: int
    source: str

    @property
    def divided_numel(self) -> int:
        """Parameters that are divided over the ranks."""
        in_blocks = sum(len(names) * plan.divided_numel for names, plan in self.families)
        return in_blocks + self.vocabulary.divided_numel

    def restricted(self, names: Collection[str]) -> ModelTensorPlan:
        """The part of the plan that is about some blocks, embeddings and heads: those of one pipeline stage."""
        families = [(tuple(n for n in blocks if n in names), plan) for blocks, plan in self.families]
        vocabulary = replace(
            self.vocabulary,
            embeddings=tuple(n for n in self.vocabulary.embeddings if n in names),
            heads=tuple(n for n in self.vocabulary.heads if n in names),
        )
        return replace(
            self,
            blocks=tuple(n for n in self.blocks if n in names),
            families=tuple((blocks, plan) for blocks, plan in families if blocks),
            vocabulary=vocabulary,
        )

    def report(self) -> str:
        """Describe what is divided, how that was verified, and why the rest is not."""
        share = self.divided_numel / max(1, self.total_numel)
        lines = [
            f"tensor parallel over {self.tp_size} ranks: {share:.1%} of {self.total_numel:,} parameters are divided",
            f"seen with {self.source}",
        ]
        for names, plan in self.families:
            ends = names if len(names) < 3 else (names[0], "...", names[-1])
            lines += [f"{' '.join(ends)} ({len(names)})", *(f"  {line}" for line in plan.report().splitlines())]
        return "\n".join([*lines, *self.vocabulary.report().splitlines()])


def plan_model(
    module: nn.Module,
    blocks: Sequence[str],
    tp_size: int,
    *,
    seen: Seen | None = None,
    tp_plan: TensorPlanOption = "auto",
    sequence_parallel: bool = False,
    mesh: DeviceMesh | None = None,
    use_cache: bool = True,
) -> ModelTensorPlan:
    """Find and verify a plan; the model stays as it is. It may be on the meta device.

    Args:
        module: The whole model.
        blocks: Names of its blocks.
        tp_size: Number of ranks.
        seen: What `observe` saw; without it, blocks that take one tensor are planned with a made-up one.
        tp_plan: "auto", or styles by glob of module names, or a function of the model that returns such; `STYLES` lists
            them. What no glob names is found out.
        sequence_parallel: Whether blocks take and return slices of the sequence.
        mesh: The tensor-parallel mesh; needed once a process group is initialised.
        use_cache: Whether plans on disk are read and written.

    Raises:
        ParallelConfigError: Everything that cannot be divided and should be, each with what would work.
    """
    wishes = _wishes(module, tp_plan)
    problems = Problems()
    planned: list[tuple[tuple[str, ...], BlockTensorPlan]] = []
    calls: dict[Any, Call] = {}
    for name in first_of_each_kind(module, blocks).values():
        block = module.get_submodule(name)
        try:
            call = call_with_values(seen.calls[name]) if seen else guessed_call(_with_values(block))
        except ParallelConfigError as error:
            problems.extend([_of(block, problem) for problem in error.problems])
            continue
        calls[kind_of(block)] = call
    problems.raise_if_any()
    for family in _families(module, blocks, wishes, calls):
        names, own = family.names, dict(family.wishes)
        block = module.get_submodule(names[0])
        args, kwargs = calls[kind_of(block)]
        try:
            plan = plan_block(
                block,
                args,
                kwargs,
                tp_size,
                mesh=mesh,
                styles=own,
                sequence_parallel=sequence_parallel,
                variant=family.variant,
                use_cache=use_cache,
            )
        except ParallelConfigError as error:
            problems.extend([_of(block, problem) for problem in error.problems])
            continue
        problems.extend([_of(block, problem) for problem in plan.misfits])
        if sequence_parallel and plan.sequence is None:
            why = plan.sequence_refused or "; ".join(dict.fromkeys(m.reason for m in plan.modules if m.reason))
            fix = "other lengths, or " * ("cannot be cut" in why) + _NO_SLICES
            problems.add(f"{type(block).__name__} cannot compute with slices of the sequence: {why}", fix)
        planned.append((names, plan))
    outside = {name: wish for name, wish in wishes.items() if not any(_is_inside(name, block) for block in blocks)}
    vocabulary = plan_vocabulary(module, blocks, tp_size, seen.watched if seen else None, wishes=outside)
    total = sum(p.numel() for p in module.parameters())
    source = seen.source if seen else "a made-up input of each block"
    result = ModelTensorPlan(tp_size, tuple(blocks), tuple(planned), vocabulary, total, source)
    if not problems and not result.divided_numel:
        reasons = sorted({module.reason for _, plan in planned for module in plan.modules if module.reason})
        reasons += [f"{name}: {reason}" for name, reason in vocabulary.reasons.items()]
        problems.add(
            f"nothing of {type(module).__name__} can be divided over tp ranks: {'; '.join(reasons)}", "tp_size=1"
        )
    problems.raise_if_any()
    return result


def plan_together(
    module: nn.Module, blocks: Sequence[str], examples: Iterable[Example], mesh: DeviceMesh, **options: Any
) -> ModelTensorPlan:
    """Look at a model on every rank, as it may communicate; plan on the first, and tell the others. Collective.

    Args:
        module: The whole model, the same on all ranks.
        blocks: Names of its blocks.
        examples: Ways to run it.
        mesh: The tensor-parallel mesh.
        **options: Those of `plan_model`.

    Raises:
        ParallelConfigError: On every rank, as `plan_model`.
    """
    seen = observe(module, blocks, examples)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            # Blocks run in training mode too, and only here.
            with random_state_kept():
                box[0] = plan_model(module, blocks, mesh.size(), seen=seen, mesh=mesh, **options)
        except Exception as error:  # raised on all ranks, else the others would wait
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    plan: ModelTensorPlan = box[0]
    return plan


def shard_model(
    module: nn.Module,
    plan: ModelTensorPlan,
    mesh: DeviceMesh,
    *,
    loss_parallel: bool = True,
    materialize: Callable[[Collection[str]], None] = lambda names: None,
) -> None:
    """Divide a model in place as its plan says; before FSDP, which composes with it.

    Every rank must hold the same values; nothing is sent.

    Args:
        module: The model the plan is for.
        plan: From `plan_model`.
        mesh: One-dimensional, of `plan.tp_size` ranks.
        loss_parallel: Leave the logits divided for the cross entropy; else they are gathered.
        materialize: Called with the names of modules before they are divided, for those on the meta device.
    """
    for names, block_plan in plan.families:
        for name in names:
            materialize([name])
            shard_block(module.get_submodule(name), block_plan, mesh)
    materialize(plan.vocabulary.names)
    divide_vocabulary(module, plan.vocabulary, mesh, loss_parallel=loss_parallel)


def slice_chains(
    module: nn.Module, plan: ModelTensorPlan, mesh: DeviceMesh, stages: Sequence[Sequence[str]] = ()
) -> None:
    """Cut the sequence before each chain of blocks, and gather it after; the last of all changes to a module.

    Blocks in one container are one chain, in the order of registration. Does nothing for a plan without slices.

    Args:
        module: The model.
        plan: Its plan.
        mesh: The tensor-parallel mesh.
        stages: Names of the blocks of each pipeline stage here, where a chain ends with its stage.
    """
    dims = {name: block.sequence.dim for names, block in plan.families for name in names if block.sequence is not None}
    stage_of = {name: index for index, names in enumerate(stages) for name in names}
    chains: dict[tuple[str, int], list[str]] = {}
    for name in plan.blocks:
        if name in dims:
            chains.setdefault((name.rpartition(".")[0], stage_of.get(name, 0)), []).append(name)
    for names in chains.values():
        slice_sequence([module.get_submodule(name) for name in names], mesh, dims[names[0]])


def _wishes(module: nn.Module, tp_plan: TensorPlanOption) -> dict[str, Wish]:
    """The wish for each Linear, embedding and other parameter owner that a pattern names, by full name."""
    if tp_plan == "auto":
        return {}
    styles = tp_plan(module) if callable(tp_plan) else tp_plan
    problems = Problems()
    if not isinstance(styles, Mapping):
        problems.add(
            f"tp_plan is {tp_plan!r}; it is 'auto', a mapping of globs to styles, or a function that returns one",
            "tp_plan='auto'",
        )
        problems.raise_if_any()
    names = [name for name, _ in module.named_modules() if name]
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    wishes: dict[str, Wish] = {}
    for pattern, style in styles.items():
        if style not in STYLES:
            problems.add(
                f"tp_plan[{pattern!r}] is {style!r}; the styles are {', '.join(STYLES)}",
                f'tp_plan={{"{pattern}": "shard"}}',
            )
            continue
        found = [name for name in names if _matches(name, pattern)]
        plannable = [name for name in names if _is_plannable(module.get_submodule(name))]
        if not found and not any(_matches(name, pattern) for name in parameters):
            near = _near(pattern, plannable)
            problems.add(
                f"tp_plan[{pattern!r}] matches no module of {type(module).__name__}",
                f'tp_plan={{"{near}": "{style}"}}' if near else "tp_plan='auto'",
            )
            continue
        wish = STYLES[style]
        # A module stands for what is in it.
        named = [name for name in plannable if any(name == one or _is_inside(name, one) for one in found)]
        if wish in ("shard", "gather") and not named:
            problems.add(
                f"tp_plan[{pattern!r}] wants {style!r}, and what it matches is no Linear and no embedding",
                f'tp_plan={{"{pattern}": "replicate"}}',
            )
        if wish is not None:
            wishes.update(dict.fromkeys(named, wish))
    problems.raise_if_any()
    return wishes


def _is_plannable(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, nn.Embedding)


def _matches(name: str, pattern: str) -> bool:
    # The plans of Hugging Face begin inside the base model.
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _near(pattern: str, names: Sequence[str]) -> str:
    """The glob of existing names that is most like a pattern that matches nothing."""
    globs = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names})
    suffixes = {glob: ".".join(glob.split(".")[-1 - pattern.count(".") :]) for glob in globs}
    near = difflib.get_close_matches(pattern, suffixes.values(), n=1, cutoff=0.4)
    suffix = next((suffix for suffix in suffixes.values() if suffix in near), "")
    return f"*.{suffix.lstrip('*.')}" if suffix.startswith("*") else f"*{suffix}" if suffix else ""


class _Family(NamedTuple):
    """Blocks that share a plan.

    Attributes:
        names: Their names.
        wishes: Wishes for their modules, by name in the block.
        variant: What they compute, where blocks of their kind differ in that.
    """

    names: tuple[str, ...]
    wishes: tuple[tuple[str, Wish], ...]
    variant: str


def _families(
    module: nn.Module, blocks: Sequence[str], wishes: Mapping[str, Wish], calls: Mapping[Any, Call]
) -> list[_Family]:
    families: dict[Any, list[str]] = {}
    for name in blocks:
        block = module.get_submodule(name)
        kind = kind_of(block)
        own = {full[len(name) + 1 :]: wish for full, wish in wishes.items() if _is_inside(full, name)}
        families.setdefault((kind, tuple(sorted(own.items())), _variant(block, calls[kind])), []).append(name)
    return [_Family(tuple(names), own, variant) for (_, own, variant), names in families.items()]


def _variant(block: nn.Module, call: Call) -> str:
    try:
        return fingerprint(block, *call)
    except Exception as error:  # the block's own code, which planning then meets too
        return describe(error)


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _with_values(block: nn.Module) -> nn.Module:
    """Return the block, or a copy with values of one that is on the meta device: any do to see how it is called."""
    if not any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
        return block
    return copy.deepcopy(block)._apply(with_values)


def _of(block: nn.Module, problem: Problem) -> Problem:
    return Problem(f"{type(block).__name__}: {problem.what}", problem.python, problem.yaml)
