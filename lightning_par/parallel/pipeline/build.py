"""Turn a module into the part of it that one rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.layout import ParallelMesh
from lightning_par.parallel.pipeline.absent import Absent, free_buffers, free_parameters
from lightning_par.parallel.pipeline.probe import Chain, probe
from lightning_par.parallel.pipeline.replay import Replay
from lightning_par.parallel.pipeline.runtime import Pipeline
from lightning_par.parallel.pipeline.schedules import default_stages_per_rank, stages_of_rank
from lightning_par.parallel.pipeline.shared import SharedParameters
from lightning_par.parallel.pipeline.split import Stage, split_chain
from lightning_par.parallel.shards import parameter_names
from lightning_par.parallel.stages import Stages, note_stages
from lightning_par.parallel.tensor.examples import Example

if TYPE_CHECKING:
    from lightning_par.parallel.options import ParallelOptions


@dataclass(frozen=True)
class PipelinePlan:
    """How a module is divided over the ranks of a pipeline.

    Attributes:
        chain: What the probe has shown.
        stages: All stages.
        owners: The rank of each stage.
        parameters: By name, the ranks that own a parameter.
    """

    chain: Chain
    stages: tuple[Stage, ...]
    owners: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]

    def stages_of(self, rank: int) -> list[Stage]:
        """The stages of a rank."""
        return [stage for stage, owner in zip(self.stages, self.owners, strict=True) if owner == rank]

    def blocks_of(self, rank: int) -> list[str]:
        """Names of the blocks of a rank."""
        return [name for stage in self.stages_of(rank) for name in self.chain.blocks[stage.begin : stage.end]]

    def owned(self, rank: int, root: nn.Module) -> list[str]:
        """Names of the called modules of which a rank owns a parameter."""
        names = parameter_names(root)
        called = {name: root.get_submodule(name) for name in (*self.chain.beside, *self.chain.blocks)}
        return [
            name
            for name, module in called.items()
            if any(rank in self.parameters[names[param]] for param in module.parameters())
        ]


def plan_pipeline(
    module: nn.Module,
    blocks: Sequence[str],
    examples: Iterable[Example],
    options: ParallelOptions,
    pp_size: int,
    device: torch.device,
) -> PipelinePlan:
    """Prove that a step is a chain of blocks, and cut it.

    Args:
        module: The whole model.
        blocks: Names of its blocks.
        examples: Ways to run a step; the first that shows the chain is taken.
        options: Name the schedule and the split.
        pp_size: Ranks of the pipeline.
        device: Where it will run.

    Raises:
        ParallelConfigError: If there is no such chain, or no way to cut it.
    """
    chain = _first_chain(module, blocks, examples, device)
    per_rank = options.pp_stages_per_rank or default_stages_per_rank(options.pp_schedule)
    owners: dict[int, int] = {}
    for rank in range(pp_size):
        owners.update(dict.fromkeys(stages_of_rank(options.pp_schedule, rank, pp_size, per_rank), rank))
    count = pp_size * per_rank
    stages = split_chain(chain, count, options.pp_split, _memory(module, chain, count, pp_size))
    parameters = _owners_of_parameters(module, chain, stages, owners)
    return PipelinePlan(chain, tuple(stages), tuple(owners[i] for i in range(count)), parameters)


def _first_chain(module: nn.Module, blocks: Sequence[str], examples: Iterable[Example], device: torch.device) -> Chain:
    failure: ParallelConfigError | None = None
    for example in examples:
        try:
            return probe(module, blocks, example.run, example.source, device)
        except ParallelConfigError as error:
            failure = failure or error
    raise failure or ParallelConfigError(
        Problem(
            "a pipeline is cut where a run of the model shows its blocks, and there is nothing to run it with",
            "example_inputs=<the arguments of the model's forward>, or set example_input_array on the LightningModule",
        )
    )


def _owners_of_parameters(
    module: nn.Module, chain: Chain, stages: Sequence[Stage], owners: dict[int, int]
) -> dict[str, tuple[int, ...]]:
    """By parameter the ranks that use it; one that the step does not use lies with its block, else at either end."""
    blocks = len(chain.blocks)
    block_stage = {chain.blocks[i]: stage.index for stage in stages for i in range(stage.begin, stage.end)}
    found: dict[str, tuple[int, ...]] = {}
    before_blocks = True
    for name, _ in module.named_parameters():
        inside = next((index for block, index in block_stage.items() if name.startswith(f"{block}.")), None)
        before_blocks = before_blocks and inside is None
        places = chain.uses.get(name, frozenset())
        using = {s.index for s in stages if any(s.runs(place, blocks) for place in places)}
        if not using:
            using = {inside if inside is not None else 0 if before_blocks else len(stages) - 1}
        found[name] = tuple(sorted({owners[index] for index in using}))
    return found


def _memory(module: nn.Module, chain: Chain, count: int, pp_size: int) -> Any:
    """Bytes of a stage as far as they depend on the split: parameters, and activations in proportion to the work.

    A micro-batch keeps for backward about as many elements as its FLOPs are per parameter: of two blocks of one size
    the same. Under 1F1B stage s holds those of `count - s` micro-batches. Only the balance matters, not the unit.
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    by_block = [sum(n for name, n in sizes.items() if name.startswith(f"{block}.")) for block in chain.blocks]
    prefix = sum(n for name, n in sizes.items() if 0 in chain.uses.get(name, ()))
    suffix = sum(
        n
        for name, n in sizes.items()
        if len(chain.blocks) in chain.uses.get(name, ()) and not name.startswith(f"{chain.blocks[-1]}.")
    )
    total = sum(by_block) or 1

    def memory(index: int, begin: int, end: int) -> float:
        own = sum(by_block[begin:end])
        held = own + (prefix if begin == 0 else 0) + (suffix if end == len(by_block) else 0)
        return held / total + own / total * (count - index) / count

    return memory


def agree_on_plan(plan: PipelinePlan, group: dist.ProcessGroup) -> None:
    """Compare the plans of all ranks.

    Raises:
        ParallelConfigError: If they differ.
    """
    mine = repr((plan.chain.blocks, plan.chain.cuts, plan.stages, sorted(plan.parameters.items())))
    others: list[Any] = [None] * group.size()
    dist.all_gather_object(others, mine, group=group)
    different = [rank for rank, other in enumerate(others) if other != others[0]]
    if different:
        raise ParallelConfigError(
            Problem(
                f"the step takes another way through the model on the ranks {different} of the pipeline than on rank 0",
                "let the step depend on nothing that differs between processes",
            )
        )


def divide_pipeline(
    module: nn.Module, plan: PipelinePlan, mesh: ParallelMesh, options: ParallelOptions, device: torch.device
) -> Pipeline:
    """Free what other ranks own; `start_pipeline` then lets the rest run, after all hooks are in place.

    Args:
        module: The whole model; changed in place.
        plan: How it is divided.
        mesh: Gives the ranks of the pipeline.
        options: Name the schedule.
        device: Where the stages run.
    """
    group = mesh.group("pp")
    rank = group.rank()
    chain = plan.chain
    called = [*chain.beside, *chain.blocks]
    submodules = {name: module.get_submodule(name) for name in called}
    absent = {name: Absent(name, child, chain.outlines[name], device) for name, child in submodules.items()}
    owned = plan.owned(rank, module)
    shared = SharedParameters(
        {name: ranks for name, ranks in plan.parameters.items() if len(ranks) > 1 and rank in ranks}, group
    )
    foreign = [name for name in submodules if name not in owned]
    last = plan.owners[-1]
    note_stages(module, Stages(group, last, tuple(module.state_dict()), tuple(plan.parameters), tuple(foreign)))
    free_parameters(module, {name for name, ranks in plan.parameters.items() if rank not in ranks}, device)
    free_buffers(module, [inner for name in foreign for inner in submodules[name].modules()])
    replay = Replay(module, chain, absent, owned, device)
    return Pipeline(
        module,
        replay,
        plan.stages,
        [stage.index for stage in plan.stages_of(rank)],
        plan.owners,
        group,
        options.pp_schedule,
        device,
        mesh.data_rank,
        options.microbatches(group.size()),
        options.pp_loss_weight,
        shared,
    )
