"""`ResumableSampler`: torch's order for whole epochs, and each remaining sample once after a resume on any ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from probe import Numbers, some
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par.checkpoint import CheckpointError, ResumableSampler


def samplers(length: int, ranks: int, **options: Any) -> list[ResumableSampler]:
    options = {"shuffle": True} | options
    return [ResumableSampler(length, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def in_global_order(parts: list[list[int]]) -> list[int]:
    return [index for turn in zip(*parts, strict=True) for index in turn]


@pytest.mark.parametrize("length", [1, 7, 24])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_epochs_are_those_of_torch(length: int, ranks: int, drop_last: bool) -> None:
    if drop_last and length < ranks:
        pytest.skip("no rank has a sample")
    for shuffle, epoch, rank in [(s, e, r) for s in (False, True) for e in (0, 3) for r in range(ranks)]:
        options: Any = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        ours, theirs = ResumableSampler(length, **options), DistributedSampler(range(length), **options)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("case", some(range(60), *range(12)))
def test_any_ranks_go_on_where_others_stopped(case: int) -> None:
    """Several resumes in one epoch; together they see the order of the epoch, and no sample twice but at its end."""
    draw = random.Random(case)
    length, epoch = draw.randint(1, 60), draw.randint(0, 4)
    state: dict[str, Any] | None = None
    seen: list[int] = []
    while True:
        ranks = draw.choice([1, 2, 3, 4, 6])
        group = samplers(length, ranks, seed=9)
        for sampler in group:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)
        left = length - len(seen)
        used = draw.randint(0, -(-left // ranks))
        parts = [[index for index, _ in zip(sampler, range(used), strict=False)] for sampler in group]
        states = [sampler.state_dict(used) for sampler in group]
        assert all(other == states[0] for other in states)
        seen += in_global_order(parts)
        state = states[0]
        if used == -(-left // ranks):
            break
    (whole,) = samplers(length, 1, seed=9)
    whole.set_epoch(epoch)
    order = list(whole)
    assert seen[:length] == order
    repeated = seen[length:]
    assert repeated == (order * 6)[: len(repeated)]
    assert len(repeated) < 6


def test_the_place_is_over_with_its_epoch() -> None:
    first, fresh = samplers(10, 2)[0], samplers(10, 2)[0]
    for _ in zip(first, range(3), strict=False):
        pass
    fresh.load_state_dict(first.state_dict(3))
    assert fresh.epoch == 0
    assert len(list(fresh)) == 2
    assert len(list(fresh)) == 5
    fresh.load_state_dict(first.state_dict(3))
    fresh.set_epoch(1)
    first.set_epoch(1)
    assert list(fresh) == list(first)


def test_a_loader_reads_ahead_and_the_loop_says_how_far_it_is() -> None:
    sampler = samplers(20, 2)[1]
    batches = iter(DataLoader(Numbers(20), batch_size=2, sampler=sampler, num_workers=1))
    seen = next(batches).tolist()
    assert sampler.state_dict()["consumed"] > 4
    resumed = samplers(20, 2)[1]
    resumed.load_state_dict(sampler.state_dict(used=2))
    rest = [index for batch in DataLoader(Numbers(20), batch_size=2, sampler=resumed) for index in batch.tolist()]
    assert seen + rest == list(samplers(20, 2)[1])


def test_another_order_is_refused() -> None:
    state = samplers(20, 2, seed=1)[0].state_dict()
    with pytest.raises(CheckpointError, match=r"(?s)length was 20 and is 21 now.*seed was 1 and is 2 now.*seed: 1"):
        samplers(21, 1, seed=2)[0].load_state_dict(state)
