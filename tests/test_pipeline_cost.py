"""What a replayed pipeline costs beside its stages, in what can be counted: collectives and bytes."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import replay
from lightning_par import ParallelLayout, parallelize
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.pipeline.batch import Step, loss_of
from lightning_par.testing import run_ranks

WIDTH = 6


class Net(nn.Module):
    """Returns the sum of two mean losses, each of which may ignore targets of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, one, other = batch
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, one) + F.cross_entropy(x, other)


def samples(rows: int, *, alike: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator)
    one = torch.randint(WIDTH, (rows,), generator=generator)
    other = one.clone()
    if not alike:
        other[0] = -100
    return x, one, other


def pipelined(model: Net) -> Any:
    options = ParallelOptions(blocks=["blocks.*"], pp_microbatches=2)
    layout = ParallelLayout(pp_size=2, dp_shard_size=1)
    return parallelize(model, layout, options=options, example_inputs=(samples(2),)).pipeline


def collectives() -> list[dict[str, int]]:
    model = Net()
    pipeline = pipelined(model)
    found: list[dict[str, int]] = []
    names = ("all_reduce", "all_gather_object", "broadcast_object_list", "broadcast", "all_gather")
    originals = {name: getattr(dist, name) for name in names}
    counts: Counter[str] = Counter()

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return originals[name](*args, **kwargs)

    for name in names:
        setattr(dist, name, partial(counted, name))
    try:
        for rows in (4, 4, 6, 6, 4):
            counts.clear()
            pipeline.train(Step(model, model, loss_of, "train"), samples(rows))
            found.append(dict(counts))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return found


def test_a_batch_of_known_shapes_takes_one_collective() -> None:
    for _, known, new, seen, again in run_ranks(2, collectives, timeout=20):
        assert known == seen == again == {"all_reduce": 1}
        # What crosses is found out first, and each rank must know that all could.
        assert new == {"all_reduce": 2}


def unequal_targets() -> tuple[list[str], bool]:
    model = Net()
    alone = copy.deepcopy(model)
    pipeline = pipelined(model)
    said = []
    for alike in (True, False, True):
        model.zero_grad()
        try:
            pipeline.train(Step(model, model, loss_of, "train"), samples(4, alike=alike))
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    alone(samples(4)).backward()
    theirs = dict(alone.named_parameters())
    return said, all(torch.allclose(p.grad, theirs[n].grad) for n, p in model.named_parameters())  # type: ignore[arg-type]


def test_losses_that_cannot_be_weighed_are_an_error_on_all_stages() -> None:
    for rank, (said, same) in enumerate(run_ranks(2, unequal_targets, timeout=20)):
        assert said[0] == said[2] == ""
        assert "different shares of targets" in said[1]
        assert said[1].startswith("ParallelConfigError" if rank else "RuntimeError: the step failed on rank 1")
        assert same


@cache
def measured_by_hand() -> list[Any]:
    return run_ranks(2, replay.measure_memory, replay.QUICK, replay.by_hand, timeout=30)


@pytest.mark.parametrize("build", [replay.replayed, replay.in_fabric])
def test_a_rank_holds_and_sends_what_stages_by_hand_do(build: Any) -> None:
    by_hand = measured_by_hand()
    ours = run_ranks(2, replay.measure_memory, replay.QUICK, build, timeout=30)
    block = sum(p.numel() * p.element_size() for p in replay.GPT(replay.QUICK).blocks[0].parameters())
    for mine, theirs in zip(ours, by_hand, strict=True):
        assert mine.state == theirs.state
        # Nothing of the size of a block: batches and what is received; and for the place in the epoch two states of the
        # default generator and of the loader's own.
        assert mine.beside <= block // 4 + 4 * torch.get_rng_state().nbytes
        assert mine.step <= theirs.step + block // 4
        assert mine.sent == theirs.sent > 0


def stage_gradients(build: Any) -> dict[str, Tensor]:
    """The weights after one step of SGD, by the names of the undivided model."""
    original = replay.optimizer
    replay.optimizer = lambda module: torch.optim.SGD(module.parameters(), lr=1.0)
    try:
        model, _ = next(build(replay.QUICK, 1))
    finally:
        replay.optimizer = original
    first = replay.QUICK.layers // replay.RANKS if isinstance(model, replay.LastStage) else 0
    return {renumbered(name, first): p.detach().clone() for name, p in model.named_parameters()}


def renumbered(name: str, first: int) -> str:
    parts = name.split(".")
    return ".".join(["blocks", str(int(parts[1]) + first), *parts[2:]]) if parts[0] == "blocks" else name


def test_the_stages_by_hand_do_the_same() -> None:
    by_hand = run_ranks(2, stage_gradients, replay.by_hand, timeout=30)
    ours = run_ranks(2, stage_gradients, replay.replayed, timeout=30)
    start = dict(fresh().named_parameters())
    for rank in range(2):
        named = {name.replace("head.", "tokens."): p for name, p in by_hand[rank].items()}
        assert named.keys() == ours[rank].keys()
        for name, p in ours[rank].items():
            torch.testing.assert_close(p, named[name])
            assert not torch.equal(p, start[name])


def fresh() -> nn.Module:
    torch.manual_seed(replay.SEED)
    return replay.GPT(replay.QUICK)
