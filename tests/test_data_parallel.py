"""The data-parallel room by itself, in raw torch loops: gradients, unusual parameters, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe import crossed, long_run
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_par import ParallelLayout, ParallelOptions, parallelize
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.replicate import GradientReducer
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import RanksFailed, run_ranks
from models import GPT, LENGTH, VOCABULARY, Block

REPLICATE = ParallelLayout(dp_replicate_size=-1, dp_shard_size=1)
SHARD = ParallelLayout()
LAYOUTS = {"ddp": REPLICATE, "fsdp": SHARD}


def batch(rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def build(seed: int = 0, cls: Callable[..., nn.Module] = GPT) -> nn.Module:
    torch.manual_seed(seed)
    return cls().double()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full_tensor(p.grad).clone() for n, p in model.named_parameters()}


def assert_equal_gradients(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    for name, gradient in want.items():
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


class Branching(nn.Module):
    """Uses only one of its branches, and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x).pow(2).mean()


def unused_on_some_ranks(bucket_bytes: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = build(cls=Branching), build(cls=Branching)
    reducer = GradientReducer(model.parameters(), dist.group.WORLD, bucket_bytes=bucket_bytes)
    for step in range(2):
        x = torch.ones(2, 4, dtype=torch.float64)
        model(x * (rank + 1), branch=(rank + step) % 2).backward()
        for r in range(ranks):
            (alone(x * (r + 1), branch=(r + step) % 2) / ranks).backward()
        assert_equal_gradients(gradients(model), gradients(alone))
    reducer.close()


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
def test_parameters_used_on_some_ranks_only_or_never(bucket_bytes: int) -> None:
    run_ranks(2, unused_on_some_ranks, bucket_bytes)


def no_gradient_at_all_on_one_rank() -> float | None:
    model = build(cls=Branching)
    reducer = GradientReducer(model.parameters(), dist.group.WORLD)
    if dist.get_rank() == 0:
        model(torch.ones(2, 4, dtype=torch.float64), branch=0).backward()
    else:
        (torch.zeros(1, requires_grad=True) * 2).sum().backward()
    reducer.finish()
    grad = model.branches[0].weight.grad
    return None if grad is None else float(grad.sum())


def test_a_rank_whose_loss_reaches_no_parameter_takes_part() -> None:
    first, second = run_ranks(2, no_gradient_at_all_on_one_rank)
    assert first is not None
    assert first == second != 0


def toggled_and_unfrozen() -> None:
    """A GAN's toggles, and a parameter that is frozen when the reducer is made and trained later."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = build(cls=Branching), build(cls=Branching)
    for m in (model, alone):
        m.branches[1].requires_grad_(False)
    reducer = GradientReducer(model.parameters(), dist.group.WORLD)
    assert not model.branches[1].weight.requires_grad
    for trained in (0, 1):
        for m in (model, alone):
            m.branches[trained].requires_grad_(True)
            m.branches[1 - trained].requires_grad_(False)
        x = torch.ones(2, 4, dtype=torch.float64)
        model(x * (rank + 1), branch=trained).backward()
        for r in range(ranks):
            (alone(x * (r + 1), branch=trained) / ranks).backward()
        assert_equal_gradients(gradients(model), gradients(alone))
    reducer.close()


def test_requires_grad_may_change_between_backwards() -> None:
    run_ranks(2, toggled_and_unfrozen)


def accumulated(layout: ParallelLayout, options: dict[str, Any], steps: int) -> None:
    """Three accumulation steps, nested contexts: the sum of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = build(), build()
    par = parallelize(model, layout, "64-true", ParallelOptions(**options))
    for window in range(2):
        for i in range(steps):
            with par.accumulating(i < steps - 1), par.accumulating(i < steps - 1):
                loss_of(model, batch(100 * window + ranks * i + rank)).backward()
                par.finish_backward()
            for r in range(ranks):
                (loss_of(alone, batch(100 * window + ranks * i + r)) / ranks).backward()
        assert_equal_gradients(gradients(model), gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize(
    "options", [{}, {"zero_stage": 1}, long_run({"zero_stage": 2}), long_run({"sync_every_batch": False})], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulation_in_a_raw_loop(layout: str, options: dict[str, Any]) -> None:
    run_ranks(2, accumulated, LAYOUTS[layout], options, 3)


def count_collectives(layout: ParallelLayout, options: dict[str, Any], steps: int) -> dict[str, int]:
    """Collectives of the second window of `steps` accumulation steps."""
    model = build()
    par = parallelize(model, layout, "64-true", ParallelOptions(**options))
    newer = hasattr(dist, "all_gather_single")
    gather, scatter = (
        ("all_gather_single", "reduce_scatter_single") if newer else ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    counts = {gather: 0, scatter: 0, "all_reduce": 0}

    def counted(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as stack:
        for name in counts:
            stack.enter_context(counted(name))
        for _ in range(2):
            model.zero_grad()
            counts.update(dict.fromkeys(counts, 0))
            for i in range(steps):
                with par.accumulating(i < steps - 1):
                    loss_of(model, batch(i)).backward()
                    par.finish_backward()
    return dict(zip(("all_gather", "reduce_scatter", "all_reduce"), counts.values(), strict=True))


def test_traffic_of_each_stage_over_a_window_of_three() -> None:
    """GPT has 3 blocks; the tied embedding and head, the norm and the positions are in the root."""
    ours = {"blocks": 3, "others": 1}
    units = sum(ours.values())

    def counted(**options: Any) -> dict[str, int]:
        return run_ranks(2, count_collectives, SHARD, options, 3)[0]

    # In the one small all-reduce the ranks agree on which parameters were used.
    assert counted(zero_stage=1) == {"all_gather": units, "reduce_scatter": units, "all_reduce": 1}
    assert counted(zero_stage=2) == {"all_gather": units, "reduce_scatter": 3 * units, "all_reduce": 1}
    assert counted(zero_stage=3) == {
        # Blocks are gathered again in backward.
        "all_gather": 3 * (2 * ours["blocks"] + ours["others"]),
        "reduce_scatter": 3 * units,
        "all_reduce": 1,
    }
    once = run_ranks(2, count_collectives, REPLICATE, {}, 3)[0]
    assert once == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1}


def hsdp_traffic() -> dict[str, int]:
    return count_collectives(ParallelLayout(dp_replicate_size=2), {}, 3)


def test_hsdp_averages_between_replicas_once_a_window() -> None:
    counts = run_ranks(4, hsdp_traffic)[0]
    assert counts["reduce_scatter"] == 3 * 4
    assert counts["all_reduce"] == 4 + 1


class Odd(nn.Module):
    """A 0-dim parameter, a frozen one, sizes that no number of ranks divides, and a parameter used past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(Block(6, 2) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(5))
        self.blocks[1].mlp[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return F.linear(h, self.tokens.weight) * self.scale + self.shift.sum()


def odd_parameters(layout: ParallelLayout) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = build(cls=Odd), build(cls=Odd)
    par = parallelize(model, layout, "64-true")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4, foreach=False) for m in (model, alone)]
    for step in range(2):
        loss_of(model, batch(ranks * step + rank)).backward()
        par.finish_backward()
        for r in range(ranks):
            (loss_of(alone, batch(ranks * step + r)) / ranks).backward()
        assert_equal_gradients(gradients(model), gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p), q, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("layout", "ranks"), crossed(LAYOUTS, (2, 4), quick=[("ddp", 2), ("fsdp", 4)]))
def test_unusual_parameters(layout: str, ranks: int) -> None:
    run_ranks(ranks, odd_parameters, LAYOUTS[layout])


def units_of_gpt() -> tuple[dict[str, int], bool]:
    model = build()
    parallelize(model, SHARD, "64-true")
    units = {n: sum(p.numel() for p in m.parameters()) for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    return units, model.head.weight is model.tokens.weight


def test_units_and_ties() -> None:
    units, tied = run_ranks(2, units_of_gpt)[0]
    assert set(units) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert tied


def different_seeds(layout: ParallelLayout) -> tuple[Tensor, Tensor]:
    model = build(seed=dist.get_rank())
    first = model.blocks[0].qkv.weight.detach().clone()
    parallelize(model, layout, "64-true")
    return first, full_tensor(model.blocks[0].qkv.weight).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_a_common_seed_take_the_weights_of_rank_0(layout: str) -> None:
    (first, result0), (second, result1) = run_ranks(2, different_seeds, LAYOUTS[layout])
    assert not torch.equal(first, second)
    assert torch.equal(result0, first)
    assert torch.equal(result1, first)


class Bypassing(nn.Module):
    """Calls parts of its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.mlp(block.norm2(x))
        return x


def bypass() -> None:
    model = build(cls=Bypassing)
    parallelize(model, SHARD, "64-true")
    model(torch.ones(1, LENGTH, 16, dtype=torch.float64))


def test_a_bypassed_block_is_reported_with_the_level_to_shard_at() -> None:
    with pytest.raises(RanksFailed, match=r"`blocks\.0\.norm2` was called while its block `blocks\.0` \(Block\)"):
        run_ranks(2, bypass)


class Plain(nn.Module):
    """Nothing repeats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Conv1d(1, width, 3)


def nothing_to_shard(width: int, **options: Any) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_par")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with torch.device("meta" if width > 1000 else "cpu"):
            model = Plain(width)
        parallelize(model, SHARD, options=ParallelOptions(**options))
    except ParallelConfigError as error:
        messages.append(str(error))
    finally:
        logger.removeHandler(handler)
    return messages


def test_a_small_model_without_blocks_says_that_it_is_one_unit() -> None:
    messages = run_ranks(2, nothing_to_shard, 8)[0]
    assert any("has no repeated blocks" in m and "as one unit" in m for m in messages)


def test_a_small_model_without_blocks_cannot_be_checkpointed_by_blocks() -> None:
    message = run_ranks(2, nothing_to_shard, 8, activation_checkpointing="full", compile=True)[0][0]
    assert "and activation_checkpointing='full' and compile=True works on blocks" in message
    assert "or no activation_checkpointing" in message


def test_a_large_model_without_blocks_is_refused_with_the_classes_seen() -> None:
    messages = run_ranks(2, nothing_to_shard, 4000)[0]
    assert any("Conv1d" in m and "Linear" in m and "blocks=" in m for m in messages)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(3))
        self.blocks[0].mlp.bfloat16()


def mixed_dtypes() -> None:
    parallelize(Mixed(), SHARD)


def test_a_unit_of_two_dtypes_is_refused() -> None:
    with pytest.raises(RanksFailed, match=r"several dtypes: float32 \(Block\..*\), bfloat16 \(Block\.mlp"):
        run_ranks(2, mixed_dtypes)


def outside_of_the_step(grad: bool) -> bool:
    """The root's own parameters are used by a submodule while the root's forward does not run."""
    torch.manual_seed(0)
    root = nn.Module()
    root.model = GPT()  # type: ignore[assignment]
    root.forward = lambda x: root.model(x)  # type: ignore[assignment, method-assign, operator]
    expected = root.model(batch(0)).detach()  # type: ignore[operator]
    parallelize(root, SHARD)
    assert isinstance(root.model.positions, DTensor)  # type: ignore[union-attr]
    with torch.set_grad_enabled(grad):
        return bool(torch.allclose(root.model(batch(0)), expected, atol=1e-5))  # type: ignore[operator]


def test_sampling_outside_the_step_gathers_what_it_needs() -> None:
    assert run_ranks(2, outside_of_the_step, False) == [True, True]


def test_gradients_outside_the_step_are_refused() -> None:
    with pytest.raises(RanksFailed, match="is called with gradients outside training_step"):
        run_ranks(2, outside_of_the_step, True)


def stale_after_evaluation() -> None:
    """A forward without backward leaves ZeRO-1 parameters gathered; the next step must not be lost."""
    model, alone = build(), build()
    par = parallelize(model, SHARD, "64-true", ParallelOptions(zero_stage=1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for m in (model, alone):
        loss_of(m, batch(0)).backward()
    with torch.no_grad():
        loss_of(model, batch(1))
    par.data.reshard()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(loss_of(model, batch(1)), loss_of(alone, batch(1)), rtol=0, atol=1e-12)


def test_evaluation_between_backward_and_step() -> None:
    run_ranks(2, stale_after_evaluation)


def dtypes_of(precision: str, layout: ParallelLayout) -> tuple[str, str]:
    torch.manual_seed(0)
    model = GPT()
    model.register_buffer("table", torch.ones(3))
    par = parallelize(model, layout, precision)
    with par.policy.autocast_context("cpu"):
        loss_of(model, batch(0)).backward()
    par.finish_backward()
    return str(model.blocks[0].qkv.weight.grad.dtype), str(model.table.dtype)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_raw_loop_gets_the_dtypes_of_its_policy(layout: str) -> None:
    assert run_ranks(2, dtypes_of, "bf16-true", LAYOUTS[layout])[0] == ("torch.bfloat16", "torch.bfloat16")
    assert run_ranks(2, dtypes_of, "bf16-mixed", LAYOUTS[layout])[0] == ("torch.float32", "torch.float32")


class SometimesScaled(nn.Module):
    """Rank 0 alone uses the 0-dim parameter, which FSDP2 cannot cut."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        logits = self.model(x)
        return F.cross_entropy((logits * self.scale if scaled else logits).flatten(0, 1), x.flatten())


def scalar_on_one_rank(layout: ParallelLayout) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = build(cls=SometimesScaled), build(cls=SometimesScaled)
    par = parallelize(model, layout, "64-true")
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(batch(step * ranks + rank), scaled=rank == 0).backward()
        par.finish_backward()
        for r in range(ranks):
            (alone(batch(step * ranks + r), scaled=r == 0) / ranks).backward()
        assert_equal_gradients(gradients(model), gradients(alone))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scalar_parameter_that_one_rank_uses(layout: str) -> None:
    run_ranks(2, scalar_on_one_rank, LAYOUTS[layout], timeout=30.0)


def what_is_left(layout: ParallelLayout) -> list[str]:
    """What of a model and its parallelism outlives them."""
    model = build(cls=SometimesScaled)
    par = parallelize(model, layout, "64-true")
    model(batch(0), scaled=True).backward()
    par.finish_backward()
    assert par.data.reducer is not None
    left = {"model": model, "parameter": model.scale, "handle": par, "reducer": par.data.reducer}
    watched = {name: weakref.ref(thing) for name, thing in left.items()}
    del model, par, left
    gc.collect()
    return [name for name, thing in watched.items() if thing() is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_outlives_the_model(layout: str) -> None:
    assert run_ranks(2, what_is_left, LAYOUTS[layout]) == [[], []]
