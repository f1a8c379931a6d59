"""Pipelines in a plain torch loop, in Fabric, and of stages that a module names itself."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from probe import launched, long_run, same, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.errors import ParallelConfigError
from lightning_par.layout import ParallelLayout
from lightning_par.parallel.apply import parallelize
from lightning_par.parallel.options import ParallelOptions
from lightning_par.testing import run_ranks

STEPS, BATCH = 4, 8


class Net(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tokens(step: int) -> Tensor:
    return torch.randint(16, (BATCH, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, tokens(step)) / 2
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def raw_loop(sizes: dict[str, int]) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = Net().double()
    layout = ParallelLayout(**{"dp_shard_size": 1, **sizes})
    par = parallelize(model, layout, "64-true", ParallelOptions(blocks=["blocks.*"]), example_inputs=(tokens(0)[:2],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        mine = tokens(step).chunk(par.mesh.data_size)[par.mesh.data_rank]
        with par.accumulating(step % 2 == 0):
            losses.append(float(par.forward_backward(lambda batch: loss_of(model, batch) / 2, mine)))
        if step % 2:
            par.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    logits = par.forward_only(model, tokens(0))
    return losses, weights(model), logits


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"pp_size": 2}),
        (1, {}),
        long_run(4, {"pp_size": 2, "dp_shard_size": 2}),
        long_run(4, {"pp_size": 4}),
        long_run(2, {"dp_shard_size": 2}),
    ],
    ids=str,
)
def test_one_call_trains_in_a_plain_loop_under_every_layout(ranks: int, sizes: dict[str, int]) -> None:
    losses, expected = one_process()
    found = run_ranks(ranks, raw_loop, sizes)
    data_ranks = sizes.get("dp_shard_size", 1)
    means = torch.tensor([record[0] for record in found]).view(-1, data_ranks, STEPS).mean(1)
    torch.testing.assert_close(means, torch.tensor([losses] * len(means)), rtol=1e-6, atol=0)
    for _, mine, logits in found:
        assert mine
        assert same(mine, {name: expected[name] for name in mine})
        assert torch.equal(logits, found[0][2])
    assert set().union(*(mine for _, mine, _ in found)) == set(expected)


def fabric_loop() -> tuple[list[float], dict[str, Tensor], bool]:
    from lightning_par.strategies.fabric import PipelineParallelStrategy

    fabric = launched(PipelineParallelStrategy(blocks=["blocks.*"], example_inputs=(tokens(0)[:2],)))
    module = Net()
    # Built before set-up: the parameters of other stages leave it.
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    losses = []
    for step in range(STEPS):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            made = fabric.strategy.forward_backward(
                lambda batch: {"loss": loss_of(model, batch) / 2, "first": batch[:, 0]}, tokens(step)
            )
        assert torch.equal(made["first"], tokens(step)[:, 0])
        losses.append(float(made["loss"]))
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    inside = fabric.strategy.forward_only(model, tokens(1))
    with torch.no_grad():
        outside = model(tokens(1))  # a call of the whole model, which all ranks make
    return losses, weights(module), torch.allclose(inside, outside, rtol=1e-6)


def test_one_call_trains_in_fabric() -> None:
    losses, expected = one_process()
    for found, mine, alike in run_ranks(2, fabric_loop):
        # Fabric hands out logits in single precision.
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        assert same(mine, {name: expected[name] for name in mine}, 1e-6)
        assert alike


class NoChain(pl.LightningModule):
    """Its forward is no chain of blocks of one kind; it names its stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.front = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Tanh())
        self.middle = nn.Bilinear(12, 12, 8)
        self.back = nn.Linear(8, 16)
        self.both = Twice()

    def configure_pipeline(self) -> Any:
        return [self.front, self.both, self.middle, self.back], self.loss

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        loss = F.cross_entropy(output.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.back(self.middle(*self.both(self.front(batch)))), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twice(nn.Module):
    """Returns a tuple: the arguments of the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x + self.scale


def fit(module: pl.LightningModule, strategy: Any) -> tuple[dict[str, Tensor], float]:
    fitted = trainer(strategy)
    fitted.fit(module, DataLoader([tokens(step) for step in range(STEPS)], batch_size=None))
    return weights(module), float(fitted.callback_metrics["loss"])


def fit_pipeline() -> tuple[dict[str, Tensor], float]:
    from lightning_par.strategies import PipelineParallelStrategy

    module = NoChain()
    result = fit(module, PipelineParallelStrategy())
    assert "training_step" not in vars(module), "the hook's step is taken away at the end"
    return result


def test_a_module_names_its_stages() -> None:
    expected, loss = run_ranks(1, fit, NoChain(), "auto")[0]
    for mine, found in run_ranks(2, fit_pipeline):
        assert found == pytest.approx(loss, rel=1e-9)
        assert 0 < len(mine) < len(expected)
        assert same(mine, {name: expected[name] for name in mine})


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda self: [self.front, self.back], "returns list"),
        (lambda self: ([self.front, nn.Linear(1, 1)], self.loss), "a Linear that is no submodule of it"),
        (lambda self: ([self.front, self.front], self.loss), "returns a module twice"),
    ],
    ids=["no loss", "foreign", "twice"],
)
def test_a_wrong_hook_is_refused(hook: Any, words: str) -> None:
    from lightning_par.strategies.explicit import explicit_stages

    module = copy.copy(NoChain())
    object.__setattr__(module, "configure_pipeline", lambda: hook(module))
    with pytest.raises(ParallelConfigError, match=words):
        explicit_stages(module)


class _Failing(torch.autograd.Function):
    """Does nothing forward, and fails backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient of this")


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Failing.apply(x)


def fail_backward(block: int, schedule: str) -> str:
    model = Net().double()
    model.blocks[block].append(Fails())
    options = ParallelOptions(blocks=["blocks.*"], pp_schedule=schedule)
    layout = ParallelLayout(pp_size=2, dp_shard_size=1)
    par = parallelize(model, layout, "64-true", options, example_inputs=(tokens(0)[:2],))
    with pytest.raises((ValueError, RuntimeError)) as error:
        par.forward_backward(lambda batch: loss_of(model, batch), tokens(0))
    return str(error.value)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("block", [0, 3])
def test_a_backward_that_fails_on_one_stage_is_an_error_on_all(block: int, schedule: str) -> None:
    for said in run_ranks(2, fail_backward, block, schedule, timeout=60):
        assert "no gradient of this" in said
