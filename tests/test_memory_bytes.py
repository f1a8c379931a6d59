"""Counting the bytes of live tensors and of the state of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_par.parallel.memory import live_tensor_bytes, model_state_bytes


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of one rank, without network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.usefixtures("nothing_from_before")
def test_live_tensor_bytes_counts_each_storage_once() -> None:
    base = live_tensor_bytes()
    a = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    views = [a.detach(), a.detach()[:10], a.detach().view(10, 100)]
    assert live_tensor_bytes() - base == 8000
    a.grad = torch.ones_like(a)
    assert live_tensor_bytes() - base == 16000
    assert live_tensor_bytes(exclude=[a]) - base == 8000
    meta = torch.empty(10**9, device="meta")
    assert live_tensor_bytes() - base == 16000
    a.detach().untyped_storage().resize_(0)
    assert live_tensor_bytes() - base == 8000
    del a, views, meta
    assert live_tensor_bytes() == base


def test_state_bytes_of_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    size = 8 * 8 * 4
    assert model_state_bytes(model, [optimizer]) == {
        "parameters": size,
        "gathered": 0,
        "gradients": 0,
        "optimizer": 0,
    }
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert model_state_bytes(model, [optimizer]) == {
        "parameters": size,
        "gathered": 0,
        "gradients": size,
        "optimizer": 2 * size + 4,
    }


def test_state_bytes_follow_what_fsdp_gathers_and_frees(one_rank: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=one_rank, reshard_after_forward=True, mp_policy=bf16)
    fully_shard(model, mesh=one_rank, mp_policy=bf16)
    shard, gathered = 2 * 8 * 8 * 4, 8 * 8 * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state() -> tuple[int, int, int, int]:
        found = model_state_bytes(model, [optimizer])
        return found["parameters"], found["gathered"], found["gradients"], found["optimizer"]

    assert state() == (shard, 0, 0, 0)
    model[0].unshard()
    assert state() == (shard, gathered, 0, 0)
    model[0].reshard()
    assert state() == (shard, 0, 0, 0)
    # Without reduction the unsharded gradients wait, in the dtype of the reduction.
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 8)).sum().backward()
    assert state() == (shard, 2 * gathered, shard, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model(torch.ones(1, 8)).sum().backward()
    assert state() == (shard, 0, shard, 0)
    optimizer.step()
    assert state() == (shard, 0, shard, shard)
