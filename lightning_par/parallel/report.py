"""What a layout would do to a module, in words and numbers, without a process group and without touching the module."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_par.blocks import BlockPlan
from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.layout import ParallelLayout
from lightning_par.parallel import tensor
from lightning_par.parallel.accounting import PHASES, human, model_state
from lightning_par.parallel.apply import check, plan_blocks
from lightning_par.parallel.data import units_beside_blocks
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import PrecisionPolicy


def explain(
    module: nn.Module,
    layout: ParallelLayout,
    policy: PrecisionPolicy,
    options: ParallelOptions,
    world_size: int,
    example_inputs: Any = None,
    svg: str | os.PathLike[str] | None = None,
) -> str:
    """Describe layout, blocks, units, dtypes and model-state bytes per rank.

    Args:
        module: The model; may be on the meta device.
        layout: As requested; a -1 is filled in.
        policy: Dtypes.
        options: How the layout would be applied.
        world_size: Number of processes.
        example_inputs: As for `parallelize`.
        svg: A file for a picture of the pipeline's schedule.

    Raises:
        ParallelConfigError: Everything that would not work.
    """
    check(layout, options, policy, world_size)
    replicated = layout.dp_shard_size == 1
    resolved = layout.resolve(world_size)
    stage = 0 if replicated else options.zero_stage
    plan = plan_blocks(module, options, sharded=not replicated, tp_size=resolved.tp_size, pp_size=resolved.pp_size)
    sections = [("Layout", resolved.describe()), ("Blocks", plan.report())]
    share = 1.0
    if resolved.pp_size > 1:
        report, share = _pipeline(module, plan, resolved, options, example_inputs, svg)
        sections.append(("Pipeline", report))
    elif svg is not None:
        raise ParallelConfigError(Problem("--svg draws the schedule of a pipeline, and pp_size is 1", "pp_size=2"))
    if resolved.tp_size > 1:
        seen = tensor.observe(module, plan.names, tensor.examples_of(module, plan.names, example_inputs))
        divided = tensor.plan_model(
            module,
            plan.names,
            resolved.tp_size,
            seen=seen,
            tp_plan=options.tp_plan,
            sequence_parallel=options.sequence_parallel,
        )
        sections.append(("Tensor parallel", divided.report()))
        share *= 1 - divided.divided_numel / divided.total_numel * (1 - 1 / resolved.tp_size)
    sections += [
        ("Sharding", _sharding(module, plan, options, replicated)),
        ("Dtypes", "\n".join(f"{name}: {value}" for name, value in policy.rows())),
        (
            f"Model state per rank, with Adam{', of the largest' * (resolved.pp_size > 1)}",
            _bytes(module, plan, resolved, policy, stage, share),
        ),
    ]
    return "\n\n".join(f"{title}\n{_indent(text)}" for title, text in sections)


def _pipeline(
    module: nn.Module,
    plan: BlockPlan,
    layout: ParallelLayout,
    options: ParallelOptions,
    example_inputs: Any,
    svg: str | os.PathLike[str] | None,
) -> tuple[str, float]:
    """The stages, and the share of the parameters that the largest rank has."""
    # torch's pipelines take long to import.
    from lightning_par.parallel.pipeline.build import plan_pipeline
    from lightning_par.parallel.pipeline.report import describe_pipeline, draw_pipeline

    examples = tensor.examples_of(module, plan.names, example_inputs)
    pipeline = plan_pipeline(module, plan.names, examples, options, layout.pp_size, torch.device("cpu"))
    report = describe_pipeline(module, pipeline, options)
    if svg is not None:
        with open(svg, "w") as file:
            file.write(draw_pipeline(pipeline, options))
        report += f"\nits schedule is drawn in {os.fspath(svg)}"
    numbers = {name: param.numel() for name, param in module.named_parameters()}
    by_rank = [
        sum(numbers[name] for name, owners in pipeline.parameters.items() if rank in owners)
        for rank in range(layout.pp_size)
    ]
    return report, max(by_rank) / max(sum(numbers.values()), 1)


def sizes(module: nn.Module) -> str:
    """Say how large a sharded module is, and how much of it this rank holds."""
    params = list(module.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    whole, here = (sum(p.numel() * p.element_size() for p in tensors) for tensors in (params, local))
    return (
        f"{sum(p.numel() for p in params):,} parameters ({human(whole)}), of which this rank holds "
        f"{sum(p.numel() for p in local):,} ({human(here)})"
    )


def _sharding(module: nn.Module, plan: BlockPlan, options: ParallelOptions, replicated: bool) -> str:
    if replicated:
        return "nothing is sharded: every rank holds all parameters, gradients are averaged in buckets during backward"
    beside = units_beside_blocks(module, plan, freed=bool(options.reshard_after_forward))
    lines = [
        f"ZeRO-{options.zero_stage} on FSDP2: {len(plan.names)} blocks, {len(beside)} units beside them, the root",
        *(f"unit: {', '.join(names)}" for names in beside),
    ]
    if options.activation_checkpointing not in (None, False):
        lines.append(f"activation checkpointing: {options.activation_checkpointing}")
    if options.compile:
        lines.append("each block is compiled")
    if options.cpu_offload:
        lines.append("shards, gradients and optimizer state are kept in host memory")
    return "\n".join(lines)


def _bytes(
    module: nn.Module,
    plan: BlockPlan,
    layout: ParallelLayout,
    policy: PrecisionPolicy,
    zero_stage: int,
    share: float,
) -> str:
    """Count bytes; `share` is the part of the parameters that one of the tp ranks has."""
    trainable = round(share * sum(p.numel() for p in module.parameters() if p.requires_grad))
    lines = [f"{trainable:,} trainable parameters over {layout.fsdp_size if zero_stage else 1} shards"]
    for phase in PHASES:
        beside_blocks = round(share * (plan.total_numel - plan.block_numel))
        state = model_state(trainable, layout.fsdp_size, policy, phase, zero_stage=zero_stage, gathered=beside_blocks)
        lines.append(
            f"{phase:16} {human(state.total):>10} = parameters {human(state.parameters)} + gathered "
            f"{human(state.gathered)} + gradients {human(state.gradients)} + optimizer {human(state.optimizer)}"
        )
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
