"""Runs that are saved in one layout and loaded in another, for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_par.checkpoint import (
    load_sharded,
    model_state,
    optimizer_state,
    save_sharded,
)
from lightning_par.parallel.shards import full_tensor


class Net(nn.Module):
    """Rows that no number of ranks divides, batch-norm counters, a scalar parameter, a frozen and an unused one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.randn(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(torch.tanh(self.norm(self.inp(x))))) * self.scale + self.table


class Factored(torch.optim.Optimizer):
    """Keeps the mean square of each row and column of a matrix, as Adafactor does, and a Python number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if p.ndim < 2:
                    p.sub_(p.grad, alpha=group["lr"])
                    continue
                if not state:
                    state.update(count=0, row=p.new_zeros(p.shape[0], 1), col=p.new_zeros(1, p.shape[1]))
                state["count"] += 1
                square = p.grad * p.grad
                state["row"].mul_(0.9).add_(square.mean(1, keepdim=True))
                state["col"].mul_(0.9).add_(square.mean(0, keepdim=True))
                p.sub_(p.grad / (state["row"] * state["col"] + 1e-2), alpha=group["lr"])


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def make_optimizers(net: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    params = trainable(net)
    if kind == "two":
        return [torch.optim.Adam(params[:2], lr=0.01), torch.optim.SGD(params[2:], lr=0.02, momentum=0.9)]
    if kind == "groups":
        groups = [{"params": params[1:], "weight_decay": 0.0}, {"params": params[:1], "betas": (0.8, 0.9)}]
        return [torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)]
    makers = {
        "adamw": lambda: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(params, lr=0.01),
        "momentum": lambda: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "factored": lambda: Factored(params),
    }
    return [makers[kind]()]


def apply_layout(net: Net, layout: str) -> Net:
    if layout == "plain":
        return net
    ranks = dist.get_world_size()
    sizes, names = ((2, ranks // 2), ("replicate", "shard")) if layout == "hsdp" else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    fully_shard(net.inp, mesh=mesh)
    fully_shard(net, mesh=mesh, ignored_params={net.scale})
    return net


def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, seed: int = 7) -> None:
    """The same data on every rank, so that every layout computes the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(torch.randn(8, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def build(layout: str, kind: str, seed: int = 0) -> tuple[Net, list[torch.optim.Optimizer]]:
    net = apply_layout(Net(seed), layout)
    return net, make_optimizers(net, kind)


def view(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Everything that training depends on, as full tensors; equal for every layout."""
    full: dict[str, Any] = {name: full_tensor(v).clone() for name, v in model_state(net).items()}
    for i, optimizer in enumerate(optimizers):
        state = optimizer_state(net, optimizer)
        for name, values in state["state"].items():
            for key, value in values.items():
                full[f"{i}/{name}/{key}"] = full_tensor(value).clone() if isinstance(value, Tensor) else value
        full[f"{i}/groups"] = state["param_groups"]
    return full


def assert_same(a: dict[str, Any], b: dict[str, Any], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, Tensor):
            assert value.dtype == b[name].dtype, name
            torch.testing.assert_close(
                b[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert value == b[name], name


def save_run(path: str, layout: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save; return what was saved, and what one more step makes of it."""
    net, optimizers = build(layout, kind)
    train(net, optimizers, 2)
    optimizers[0].param_groups[0]["lr"] = 0.005
    optimizers[0].param_groups[0]["initial_lr"] = 0.02
    states = [optimizer_state(net, optimizer) for optimizer in optimizers]
    save_sharded(path, model=model_state(net), optimizers=states, meta={"epoch": 3})
    saved = view(net, optimizers)
    train(net, optimizers, 1, seed=8)
    return saved, view(net, optimizers)


def load_run(path: str, layout: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    net, optimizers = build(layout, kind, seed=1)
    assert load_sharded(path, net, optimizers) == {"epoch": 3}
    loaded = view(net, optimizers)
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and isinstance(param, DTensor):
                    assert isinstance(value, DTensor), key
                    assert value.shape != param.shape or value.placements == param.placements
    train(net, optimizers, 1, seed=8)
    return loaded, view(net, optimizers)
