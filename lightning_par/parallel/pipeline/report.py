"""Say how a module is divided over the ranks of a pipeline, and draw how its schedule runs."""

from __future__ import annotations

from torch import nn

from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline.build import PipelinePlan
from lightning_par.parallel.pipeline.picture import draw
from lightning_par.parallel.pipeline.schedules import compute_actions
from lightning_par.parallel.pipeline.timeline import Timeline, simulate


def describe_pipeline(module: nn.Module, plan: PipelinePlan, options: ParallelOptions) -> str:
    """List the stages with their blocks, parameters and share of the work, and predict the bubble.

    Args:
        module: The whole model.
        plan: How it is divided.
        options: Name schedule and micro-batches.
    """
    ranks = max(plan.owners) + 1
    timeline = predict_timeline(plan, options)
    sizes = {name: param.numel() for name, param in module.named_parameters()}
    lines = [
        f"{len(plan.stages)} stages on {ranks} ranks, {options.pp_schedule}, {options.microbatches(ranks)} "
        f"micro-batches; predicted bubble {timeline.bubble:.1%} of the step",
        f"the chain of {len(plan.chain.blocks)} blocks was seen with {plan.chain.source}",
    ]
    rows = [("rank", "stage", "blocks", "work", "parameters of the rank", "micro-batches in flight")]
    for rank in range(ranks):
        owned = sum(size for name, size in sizes.items() if rank in plan.parameters[name])
        for number, stage in enumerate(plan.stages_of(rank)):
            first, last = plan.chain.blocks[stage.begin], plan.chain.blocks[stage.end - 1]
            blocks = first if first == last else f"{first} ... {last} ({stage.end - stage.begin})"
            whole = (f"{owned:,} ({owned / sum(sizes.values()):.1%})", f"{timeline.in_flight[rank]:g}")
            shown = (str(rank), *whole) if number == 0 else ("", "", "")
            rows.append((shown[0], str(stage.index), blocks, f"{stage.share:.1%}", *shown[1:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"carried over the cut before {plan.chain.blocks[stage.begin]}: {len(cut.slots)} tensors"
        for stage in plan.stages
        if len((cut := plan.chain.cuts[stage.begin]).slots) > 1
    ]
    lines += [
        f"shared by the ranks {', '.join(map(str, owners))}, their gradients summed: {name}"
        for name, owners in plan.parameters.items()
        if len(owners) > 1
    ]
    return "\n".join(lines)


def predict_timeline(plan: PipelinePlan, options: ParallelOptions) -> Timeline:
    """Simulate a step. A forward takes a stage's share of the work, each half of its backward as long.

    A matrix product of the forward has two in the backward of the same size: for the input and for the weights.
    """
    ranks = max(plan.owners) + 1
    actions = compute_actions(options.pp_schedule, ranks, options.microbatches(ranks), options.stages_per_rank())
    shares = {stage.index: stage.share for stage in plan.stages}
    return simulate(actions, shares, shares, shares)


def draw_pipeline(plan: PipelinePlan, options: ParallelOptions) -> str:
    """Draw the predicted schedule as SVG; the unit of time is the forward of a micro-batch through all stages."""
    return draw(predict_timeline(plan, options), options.pp_schedule)
