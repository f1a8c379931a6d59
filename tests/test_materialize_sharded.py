"""Models built without memory and then sharded: the shards of an ordinary build, and a module that trains like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_materialize import GPT, assert_same, deferred_build, llama, ordinary_build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_par.parallel.materialize import capture_init
from lightning_par.testing import run_ranks
from models import LENGTH


def shard(model: nn.Module, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.tokens, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def check_fsdp(name: str) -> None:
    """Values, names, forward, backward and a step under FSDP2; the vocabulary of 31 cannot be cut evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    build = (lambda: GPT(width=18, layers=3)) if name == "gpt" else llama
    expected, model = ordinary_build(build), deferred_build(build)
    plan = capture_init(model)
    if name == "gpt":
        shard(model, mesh)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    plan.materialize(model, "cpu")
    assert_same(model, expected)
    x = torch.arange(LENGTH)[None]
    for _ in range(2):
        losses = []
        for m in (model, expected):
            out = m(x)
            losses.append((out if isinstance(out, Tensor) else out.logits).square().mean())
            losses[-1].backward()
            torch.optim.SGD((p for p in m.parameters() if p.grad is not None), lr=0.1).step()
            m.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)


def check_tensor_parallel() -> None:
    """The same over a mesh of two dimensions, each matrix cut twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    expected, model = ordinary_build(GPT), deferred_build(GPT)
    plan = capture_init(model)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    shard(model, mesh["fsdp"])
    plan.materialize(model, "cpu")
    assert model.blocks[0].mlp[0].weight.to_local().shape == (16, 16)
    assert_same(model, expected)
    x = torch.arange(LENGTH)[None]
    torch.testing.assert_close(model(x), expected(x))


def test_tensor_parallel() -> None:
    run_ranks(4, check_tensor_parallel)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_fsdp(name: str, ranks: int) -> None:
    run_ranks(ranks, check_fsdp, name)


def check_seeds() -> None:
    """Ranks without a common seed take the model of the first, and keep their own random streams."""
    mesh = init_device_mesh("cpu", (2,))
    seed = 1 + dist.get_rank()
    expected, model = ordinary_build(GPT, 1), deferred_build(GPT, seed)
    draws = torch.get_rng_state()
    plan = capture_init(model)
    assert plan.synchronise(dist.group.WORLD)
    assert not plan.synchronise(dist.group.WORLD)
    shard(model, mesh)
    plan.materialize(model, "cpu")
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), draws)


def test_synchronise() -> None:
    run_ranks(2, check_seeds)
