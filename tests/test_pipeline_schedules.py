"""Schedules of pipelines: what is refused is what torch refuses, and what runs gives the numbers of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probe import crossed, listed, long_run, some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.pipeline._compat import planned_steps
from lightning_par.parallel.pipeline.schedules import (
    SCHEDULES,
    build_forward_only,
    build_schedule,
    compute_actions,
    default_stages_per_rank,
    run,
    schedule_problems,
    stages_of_rank,
)
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import RanksFailed, run_ranks

ROWS, WIDTH = 2, 5
CPU = torch.device("cpu")


# -- what is refused -------------------------------------------------------------------------------------------------


def refused_by_torch(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int) -> bool:
    try:
        planned_steps(name, pp_size, n_microbatches, stages_per_rank)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_of_microbatches_are_refused_exactly_where_torch_refuses_them(name: str) -> None:
    for pp_size in (1, 2, 3, 4):
        for n_microbatches in range(1, 14):
            sizes = (pp_size, n_microbatches, default_stages_per_rank(name))
            assert bool(schedule_problems(name, *sizes)) == refused_by_torch(name, *sizes), sizes


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_fix_of_a_number_of_microbatches_works(name: str) -> None:
    for pp_size in (2, 3, 4, 8):
        for n_microbatches in range(-1, 40):
            stages_per_rank = default_stages_per_rank(name)
            for problem in schedule_problems(name, pp_size, n_microbatches, stages_per_rank):
                option, number = problem.python.split("=")
                assert option == "pp_microbatches"
                assert not schedule_problems(name, pp_size, int(number), stages_per_rank)


def test_problems_have_their_numbers() -> None:
    (few,) = schedule_problems("1F1B", 4, 3, 1)
    assert few.what == "pp_microbatches is 3, 1F1B over 4 stages needs at least 4"
    (half_full,) = schedule_problems("DualPipeV", 4, 7, 2)
    assert "over 8 stages needs at least 8" in half_full.what
    (uneven,) = schedule_problems("Interleaved1F1B", 4, 11, 2)
    assert "into 2 equal rounds: 10 and 12 can be cut so" in uneven.what
    assert uneven.python == "pp_microbatches=12"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("1f1b", "1F1B"),
        ("Gpipe", "GPipe"),
        ("ScheduleInterleaved1F1B", "Interleaved1F1B"),
        ("zbv", "ZBVZeroBubble"),
        ("ZeroBubble", "ZBVZeroBubble"),
        ("dualpipe", "DualPipeV"),
        ("???", "1F1B"),
    ],
)
def test_an_unknown_name_is_answered_with_a_known_one(wrong: str, near: str) -> None:
    (problem,) = schedule_problems(wrong, 2, 4, 1)
    assert problem.python == f'pp_schedule="{near}"'
    assert repr(wrong) in problem.what


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_a_rank_and_compiled_stages(name: str) -> None:
    kind = SCHEDULES[name]
    for stages_per_rank in (0, 1, 2, 3):
        fits = stages_per_rank >= kind.least_stages and stages_per_rank <= (kind.most_stages or 3)
        problems = schedule_problems(name, 2, 8, stages_per_rank)
        assert [p.python for p in problems] == ([] if fits else [f"pp_stages_per_rank={kind.least_stages}"])
    compiled = schedule_problems(name, 2, 8, kind.least_stages, compile=True)
    assert [p.python for p in compiled] == (["compile=False"] if kind.splits_backward else [])


def test_all_problems_are_told_at_once() -> None:
    problems = schedule_problems("ZBVZeroBubble", 0, 0, 3, compile=True)
    assert [p.python.split("=")[0] for p in problems] == ["pp_size", "pp_microbatches", "pp_stages_per_rank", "compile"]


# -- where stages lie, and in which order they compute ---------------------------------------------------------------


def test_placement() -> None:
    assert [stages_of_rank("Interleaved1F1B", rank, 3, 2) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [stages_of_rank("DualPipeV", rank, 3, 2) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [stages_of_rank("GPipe", rank, 3, 1) for rank in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp_size", "n_microbatches"), [(1, 2), (2, 4), (3, 6), (4, 8)])
def test_actions_are_complete_in_order_and_on_the_rank_of_their_stage(
    name: str, pp_size: int, n_microbatches: int
) -> None:
    stages_per_rank = default_stages_per_rank(name)
    actions = compute_actions(name, pp_size, n_microbatches, stages_per_rank)
    for rank in range(pp_size):
        parts: dict[tuple[int, int], str] = {}
        for kind, stage, microbatch, _ in actions[rank]:
            parts[stage, microbatch] = parts.get((stage, microbatch), "") + kind
        held = stages_of_rank(name, rank, pp_size, stages_per_rank)
        assert set(parts) == {(stage, i) for stage in held for i in range(n_microbatches)}
        assert set(parts.values()) <= {"FB", "FIW"}


def test_the_order_of_1f1b() -> None:
    first, last = compute_actions("1F1B", 2, 3, 1).values()
    assert " ".join(f"{a.kind}{a.microbatch}" for a in first) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(f"{a.kind}{a.microbatch}" for a in last) == "F0 B0 F1 B1 F2 B2"


def test_actions_of_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match="needs at least 4"):
        compute_actions("1F1B", 4, 2, 1)


# -- schedules on processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A chain of stages, and what crosses from each to the next beside the hidden state.

    Attributes:
        stages: Number of stages.
        integers: A tensor of integers crosses.
        constant: A tensor without a gradient crosses.
        carried: What the first stage made crosses all boundaries as it is, and each stage uses it.
        unused: A tensor that requires a gradient crosses, and no later stage uses it.
        frozen: The first stage has no parameter that trains.
        view: The hidden state crosses as a view.
    """

    stages: int
    integers: bool = False
    constant: bool = False
    carried: bool = False
    unused: bool = False
    frozen: bool = False
    view: bool = False

    def boundary(self) -> tuple[Tensor, ...]:
        """What crosses, as torch wants it described: a tensor whose gradient shall come back requires one."""
        like = {"dtype": torch.float64, "device": "meta"}
        tensors = [torch.empty(ROWS, WIDTH, requires_grad=True, **like)]
        if self.integers:
            tensors.append(torch.empty(ROWS, dtype=torch.int64, device="meta"))
        if self.constant:
            tensors.append(torch.empty(ROWS, WIDTH, **like))
        for crosses in (self.unused, self.carried):
            if crosses:
                tensors.append(torch.empty(ROWS, WIDTH, requires_grad=True, **like))
        return tuple(tensors)

    def modules(self) -> list[Stage]:
        torch.manual_seed(7)
        modules = [Stage(self, index).double() for index in range(self.stages)]
        modules[0].requires_grad_(not self.frozen)
        return modules


class Stage(nn.Module):
    """One stage; as in a replay, all of them know the whole batch, and take what `mb_index` says."""

    def __init__(self, chain: Chain, index: int) -> None:
        super().__init__()
        self.chain, self.first, self.last = chain, index == 0, index == chain.stages - 1
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Parameter(torch.rand(WIDTH)) if self.first else None

    def forward(self, *received: Tensor, mb_index: Tensor) -> Any:
        assert (mb_index.shape, mb_index.dtype) == ((1,), torch.int64)
        h, *rest = self._begin(int(mb_index)) if self.first else received
        extra = iter(rest)
        h = self.one(h)
        if self.chain.integers:
            h = h * next(extra)[:, None]
        if self.chain.constant:
            h = h + next(extra)
        if self.chain.unused:
            next(extra)
        if self.chain.carried:
            h = h * next(extra)
        h = torch.tanh(self.two(torch.tanh(h)))
        if self.last:
            return h.square().sum()[None]
        # FSDP makes views of the tensors that come in; one that is handed on would be a view.
        rest = [tensor.clone() if tensor._is_view() else tensor for tensor in rest]
        return (h[:] if self.chain.view else h, *rest)

    def _begin(self, index: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        assert self.embedding is not None
        h = x + self.embedding
        optional = {"integers": torch.tensor([2, 3]), "constant": x + 1, "unused": h * 2, "carried": h + 2}
        return [h, *(value for name, value in optional.items() if getattr(self.chain, name))]


def in_one_process(chain: Chain, n_microbatches: int) -> tuple[list[Stage], list[float]]:
    """The gradients of the sum of the losses of all micro-batches, and these losses."""
    modules, losses = chain.modules(), []
    for i in range(n_microbatches):
        received: Any = ()
        for module in modules:
            received = module(*received, mb_index=torch.tensor([i]))
        received.sum().backward()
        losses.append(float(received.detach()))
    return modules, losses


def stages_here(name: str, chain: Chain, modules: list[Stage], group: Any = None) -> list[PipelineStage]:
    rank, pp_size = dist.get_rank(group), dist.get_world_size(group)
    meta = torch.empty(1, device="meta")
    return [
        PipelineStage(
            modules[i],
            i,
            chain.stages,
            CPU,
            input_args=meta if i == 0 else chain.boundary(),
            output_args=meta.double() if i == chain.stages - 1 else chain.boundary(),
            group=group,
        )
        for i in stages_of_rank(name, rank, pp_size, chain.stages // pp_size)
    ]


def step(schedule: Any, n_microbatches: int, **options: Any) -> Any:
    zeros, indices = torch.zeros(n_microbatches), torch.arange(n_microbatches)
    return run(schedule, (zeros,), zeros, mb_index=indices, **options)


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Of all gradients, against the largest one."""
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    grads = [(p, q) for p, q in pairs if p is not None and q is not None]
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in grads) if grads else 0.0


def train(name: str, chain: Chain, n_microbatches: int) -> None:
    """Two steps that accumulate, so that what is left of the first one would show in the second."""
    theirs, expected = in_one_process(chain, n_microbatches)
    ours = chain.modules()
    stages = stages_here(name, chain, ours)
    schedule = build_schedule(name, stages, n_microbatches, lambda output, target: output.sum())
    for times in (1, 2):
        losses: list[Tensor] = []
        assert step(schedule, n_microbatches, losses=losses) is None
        if any(stage.is_last for stage in stages):
            assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-12)
        for stage in stages:
            for p in stage.submod.parameters():
                p.grad = None if p.grad is None else p.grad / times
            assert largest_difference(stage.submod, theirs[stage.stage_index]) < 1e-9, (times, stage.stage_index)
            for p in stage.submod.parameters():
                p.grad = None if p.grad is None else p.grad * times


def chain_for(name: str, pp_size: int, **options: bool) -> Chain:
    return Chain(pp_size * default_stages_per_rank(name), **options)


# What crosses in the next test includes the hidden state, which is all that crosses here.
@pytest.mark.parametrize("name", some(SCHEDULES, "1F1B", "ZBVZeroBubble"))
def test_gradients_are_those_of_one_process(name: str) -> None:
    run_ranks(2, train, name, chain_for(name, 2), 4)


EVERYTHING = {"integers": True, "constant": True, "carried": True, "unused": True}


@pytest.mark.parametrize("name", some(SCHEDULES, *(name for name in SCHEDULES if name not in ("GPipe", "LoopedBFS"))))
def test_all_kinds_of_tensors_cross_boundaries(name: str) -> None:
    run_ranks(2, train, name, chain_for(name, 2, **EVERYTHING), 4)


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_first_stage_that_does_not_train(name: str) -> None:
    run_ranks(2, train, name, chain_for(name, 2, frozen=True), 4)


@pytest.mark.parametrize(
    ("name", "n_microbatches"),
    [long_run("1F1B", 5), long_run("Interleaved1F1B", 6), long_run("ZBVZeroBubble", 3), long_run("DualPipeV", 9)],
)
def test_gradients_on_four_ranks(name: str, n_microbatches: int) -> None:
    run_ranks(4, train, name, chain_for(name, 4, **EVERYTHING), n_microbatches)


# -- forwards alone --------------------------------------------------------------------------------------------------


def outputs(name: str, chain: Chain, n_microbatches: int) -> list[float]:
    """What forwards alone give on this rank, empty where the last stage is not."""
    stages = stages_here(name, chain, chain.modules())
    schedule = build_forward_only(name, stages, n_microbatches)
    for _ in range(2):
        result = step(schedule, n_microbatches, return_outputs=True)
    assert not any(stage.fwd_cache or stage.output_chunks for stage in stages)
    return [] if result is None else result.tolist()


# Quick: a chain, a loop and a V, and fewer and more micro-batches than stages.
@pytest.mark.parametrize(
    ("pp_size", "name", "n_microbatches"),
    [
        *crossed(
            (2,),
            ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
            (1, 3, 4),
            quick=[(2, "1F1B", 1), (2, "Interleaved1F1B", 3), (2, "ZBVZeroBubble", 4)],
        ),
        *crossed((4,), ("1F1B", "LoopedBFS", "DualPipeV"), (1, 3, 4), quick=[(4, "DualPipeV", 3)]),
    ],
)
def test_forwards_alone_give_the_outputs_of_one_process(pp_size: int, name: str, n_microbatches: int) -> None:
    chain = chain_for(name, pp_size, **EVERYTHING)
    *empty, full = sorted(run_ranks(pp_size, outputs, name, chain, n_microbatches), key=len)
    assert empty == [[]] * (pp_size - 1)
    assert full == pytest.approx(in_one_process(chain, n_microbatches)[1], rel=1e-12)


def test_forwards_alone_where_loop_and_v_look_alike() -> None:
    """The middle one of three ranks holds stages 1 and 4 in a loop and in a V."""
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        chain = chain_for(name, 3)
        result = max(run_ranks(3, outputs, name, chain, 2), key=len)
        assert result == pytest.approx(in_one_process(chain, 2)[1], rel=1e-12)


def train_and_evaluate(name: str) -> None:
    """Forwards alone in between, of another number, under no_grad and in inference mode, change nothing."""
    chain = chain_for(name, dist.get_world_size(), **EVERYTHING)
    theirs, losses = in_one_process(chain, 4)
    modules = chain.modules()
    stages = stages_here(name, chain, modules)
    schedule = build_schedule(name, stages, 4, lambda output, target: output.sum())
    evaluation = build_forward_only(name, stages_here(name, chain, modules), 3)
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            result = step(evaluation, 3, return_outputs=True)
        if result is not None:
            assert result.tolist() == pytest.approx(losses[:3], rel=1e-12)
        for module in modules:
            module.zero_grad()
        step(schedule, 4)
        for stage in stages:
            assert largest_difference(stage.submod, theirs[stage.stage_index]) < 1e-9


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_training_goes_on_after_forwards_alone(name: str) -> None:
    run_ranks(2, train_and_evaluate, name)


# -- sharded stages --------------------------------------------------------------------------------------------------


def sharded(name: str, pp_size: int, reshard: bool) -> list[str]:
    """Train and run forwards alone with stages under FSDP2; return the parameters without the right gradient."""
    mesh = init_device_mesh("cpu", (pp_size, dist.get_world_size() // pp_size), mesh_dim_names=("pp", "shard"))
    chain = chain_for(name, pp_size, **EVERYTHING)
    theirs, losses = in_one_process(chain, 8)
    modules, group = chain.modules(), mesh.get_group("pp")
    for module in modules:
        for unit in (module.one, module):
            fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=reshard)
    stages = stages_here(name, chain, modules, group)
    evaluation = build_forward_only(name, stages_here(name, chain, modules, group), 3)
    result = step(evaluation, 3, return_outputs=True)
    assert result is None or result.tolist() == pytest.approx(losses[:3], rel=1e-12)
    step(build_schedule(name, stages, 8, lambda output, target: output.sum()), 8)
    wrong = []
    for stage in stages:
        expected = dict(theirs[stage.stage_index].named_parameters())
        for parameter, p in stage.submod.named_parameters():
            gradient = expected[parameter].grad
            assert gradient is not None
            if p.grad is None or not torch.allclose(full_tensor(p.grad), gradient, rtol=1e-9, atol=1e-12):
                wrong.append(parameter)
    return wrong


# Units that stay whole are the easier case: a whole backward and a split one are enough for them.
@pytest.mark.parametrize(
    ("ranks", "reshard", "name"),
    listed(
        [
            *((ranks, True, name) for ranks in (2, 4) for name in SCHEDULES),
            *((4, False, name) for name in ("1F1B", "ZBVZeroBubble")),
        ],
        *((2, True, name) for name in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")),
    ),
)
def test_sharded_stages(name: str, reshard: bool, ranks: int) -> None:
    """Units that reshard after the forward lose their gradients in torch's split backward, if they are let do so."""
    assert run_ranks(ranks, sharded, name, 2, reshard) == [[]] * ranks


# -- what torch does to stages that are not as `build_schedule` wants them -------------------------------------------

SPLIT = [name for name, kind in SCHEDULES.items() if kind.splits_backward]


@pytest.mark.parametrize("name", some(SPLIT, "ZBVZeroBubble"))
def test_what_crosses_must_not_be_a_view_where_the_backward_is_split(name: str) -> None:
    with pytest.raises(RanksFailed, match="Can't detach views in-place"):
        run_ranks(2, train, name, chain_for(name, 2, view=True), 4, timeout=20)


def train_with_a_view_as_loss(name: str) -> None:
    stages = stages_here(name, chain_for(name, 2), chain_for(name, 2).modules())
    step(build_schedule(name, stages, 4, lambda output, target: output.squeeze()), 4)


@pytest.mark.parametrize("name", some(SPLIT, "InterleavedZeroBubble"))
def test_the_loss_must_not_be_a_view_where_the_backward_is_split(name: str) -> None:
    with pytest.raises(RanksFailed, match="Can't detach views in-place"):
        run_ranks(2, train_with_a_view_as_loss, name, timeout=20)


def test_views_do_no_harm_where_the_backward_is_whole() -> None:
    run_ranks(2, train, "1F1B", chain_for("1F1B", 2, view=True), 4)
    run_ranks(2, train_with_a_view_as_loss, "1F1B")


class Undeclared(Chain):
    """A chain whose hidden state is said to have no gradient, as it has none where the first stage is frozen."""

    def boundary(self) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in super().boundary())


def gradients_of_the_second_stage(name: str) -> list[bool]:
    chain = Undeclared(chain_for(name, 2).stages, frozen=True)
    modules = chain.modules()
    step(build_schedule(name, stages_here(name, chain, modules), 4, lambda output, target: output.sum()), 4)
    return [p.grad is not None for p in modules[1].parameters()]


def test_a_split_backward_finds_nothing_behind_inputs_that_are_declared_without_gradient() -> None:
    assert run_ranks(2, gradients_of_the_second_stage, "1F1B")[1] == [True] * 4
    assert run_ranks(2, gradients_of_the_second_stage, "InterleavedZeroBubble")[1] == [False] * 4


class Unusual(nn.Module):
    """A parameter that a stage does not list, and one that no path joins with the input before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.Linear(WIDTH, WIDTH)
        self.apart = nn.Parameter(torch.ones(WIDTH))
        self.unlisted = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.unlisted[0](self.listed(x)), self.apart * 2


def test_a_split_backward_finds_only_listed_parameters_that_an_input_reaches() -> None:
    stage, x = Unusual(), torch.ones(ROWS, WIDTH, requires_grad=True)
    outputs = stage(x)
    _, groups = stage_backward_input(list(outputs), [torch.ones_like(y) for y in outputs], [x], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)
    assert stage.listed.weight.grad is not None
    assert stage.apart.grad is None
    assert stage.unlisted[0].weight.grad is None
