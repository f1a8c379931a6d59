"""What existing modules do beside a plain step, over tensor-parallel ranks: as in one process, or refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from probe import long_run
from tensor_models import Nano
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from examples.nanogpt.model import NanoGPT
from lightning_par import ParallelLayout, parallelize
from lightning_par.callbacks import MemoryMonitor
from lightning_par.parallel.materialize import deferred_init
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import RanksFailed, run_ranks
from models import Tokens
from parity import Run, assert_same_training, build_strategy, in_original_order, make_trainer, train
from tensor_blocks import WIDTH

TWO = ("TensorParallelStrategy", {"tp_size": 2})
LAYOUTS = {"tp": (2, TWO), "ddp x tp": (2, ("MeshStrategy", {"tp_size": 2, "dp_shard_size": 1}))}
each_layout = pytest.mark.parametrize("layout", ["tp", long_run("ddp x tp")])


class LoRA(nn.Module):
    """A frozen Linear and a trained product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class WithLoRA(Nano):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.model.blocks:
            block.mlp_in, block.attention_out = LoRA(block.mlp_in), LoRA(block.attention_out)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


class Penalised(Nano):
    """Differentiates a gradient: the embedding is pushed to have small ones."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.model.tokens(x)
        handle = self.model.tokens.register_forward_hook(lambda *_: hidden)
        # Its fused kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            loss = super().loss(x, y)
        handle.remove()
        [gradient] = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().sum()


class Manual(Nano):
    """Two optimizers, and a gradient that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        for optimizer in (first, second):
            loss = self.loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        blocks = list(self.model.blocks.parameters())
        rest = [p for p in self.parameters() if not any(p is q for q in blocks)]
        return torch.optim.AdamW(blocks, lr=1e-3, eps=1e-4), torch.optim.SGD(rest, lr=0.1)


@pytest.mark.parametrize("model", ["WithLoRA", "Manual"])
@each_layout
def test_unusual_steps(model: str, layout: str) -> None:
    ranks, spec = LAYOUTS[layout]
    assert_same_training(Run(f"test_tensor_dropin:{model}"), ranks, spec)


@each_layout
def test_gradients_of_gradients_are_refused(layout: str) -> None:
    """torch does not differentiate collectives in a backward, so its second derivatives would be wrong."""
    ranks, spec = LAYOUTS[layout]
    with pytest.raises(RanksFailed, match="gradients are differentiated .create_graph=True. through modules that are"):
        run_ranks(ranks, train, Run("test_tensor_dropin:Penalised"), ranks, spec)


def averaged(folder: str, parallel: bool, path: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(3)
    module = Nano()
    average = EMAWeightAveraging(decay=0.7)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    strategy = build_strategy(TWO, "trainer") if parallel else "auto"
    trainer = make_trainer(
        2 if parallel else 1,
        strategy,
        max_epochs=2,
        precision="64-true",
        callbacks=[average, saver],
        enable_checkpointing=True,
    )
    trainer.fit(module, DataLoader(Tokens(8), batch_size=4), ckpt_path=path)
    mean = average._average_model.module
    return tuple(in_original_order(m, dict(m.named_parameters())) for m in (module, mean))


def test_averages_of_weights(tmp_path: Path) -> None:
    [expected] = run_ranks(1, averaged, str(tmp_path / "one"), False, None)
    whole = run_ranks(2, averaged, str(tmp_path / "two"), True, None)
    resumed = run_ranks(2, averaged, str(tmp_path / "again"), True, str(tmp_path / "two" / "epoch=0.ckpt"))
    for found in (*whole, *resumed):
        for got, want in zip(found, expected, strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def stochastic() -> str:
    trainer = make_trainer(2, build_strategy(TWO, "trainer"), max_epochs=2, callbacks=[StochasticWeightAveraging(0.1)])
    try:
        trainer.fit(Nano(), DataLoader(Tokens(8), batch_size=4))
    except ValueError as error:
        return str(error)
    return ""


def test_stochastic_averages_are_refused() -> None:
    for text in run_ranks(2, stochastic):
        assert "StochasticWeightAveraging copies the module before it is divided" in text


def monitored() -> dict[str, float]:
    trainer: pl.Trainer = make_trainer(2, build_strategy(TWO, "trainer"), max_steps=2, callbacks=[MemoryMonitor()])
    trainer.fit(Nano(), DataLoader(Tokens(8), batch_size=4))
    return {key: float(value) for key, value in trainer.callback_metrics.items() if "memory" in key}


def test_memory_is_that_of_a_rank() -> None:
    first, second = run_ranks(2, monitored)
    assert first == second


def early_optimizer(parallel: bool) -> dict[str, Tensor]:
    """A step before the module is divided, so that the optimizer has state, and two after."""
    torch.manual_seed(3)
    module = Nano().double()
    optimizer = module.configure_optimizers()
    batches = list(DataLoader(Tokens(12), batch_size=4))

    def step(module: nn.Module, batch: Any, backward: Any) -> None:
        optimizer.zero_grad()
        backward(module.model.loss(batch))
        optimizer.step()

    step(module, batches[0], Tensor.backward)
    if not parallel:
        for batch in batches[1:]:
            step(module, batch, Tensor.backward)
        return in_original_order(module, dict(module.named_parameters()))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fabric_strategies.TensorParallelStrategy(tp_size=2))
    fabric.launch()
    model, divided = fabric.setup(module, optimizer)
    model.mark_forward_method("whole_loss")
    for batch in batches[1:]:
        divided.zero_grad()
        fabric.backward(model.whole_loss(batch))
        divided.step()
    return in_original_order(module, dict(module.named_parameters()))


def test_an_optimizer_with_state_from_before_goes_on() -> None:
    [expected] = run_ranks(1, early_optimizer, False)
    for found in run_ranks(2, early_optimizer, True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


# Traps: each of these gave other numbers once, without a word


SLICES = ("TensorParallelStrategy", {"tp_size": 2, "sequence_parallel": True})


class FrozenFirst(Nano):
    """The first block is frozen, and shares its plan with one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


class Unlike(nn.Module):
    """An MLP that does what its index says, or whether it is trained."""

    def __init__(self, first: nn.Module, second: nn.Module, layer_idx: int, act: Any) -> None:
        super().__init__()
        self.first, self.second, self.layer_idx, self.act = first, second, layer_idx, act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        if self.layer_idx == 1 or (self.layer_idx == 2 and self.training):
            x = nn.functional.rms_norm(x, x.shape[-1:])
        return self.second(x)


class UnlikeBlock(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.mlp = Unlike(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), *arguments)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class UnlikeBlocks(Nano):
    def __init__(self) -> None:
        super().__init__()
        acts = (torch.tanh, torch.tanh, torch.tanh, squashed, torch.tanh)
        self.model.blocks = nn.ModuleList(UnlikeBlock(index, act) for index, act in enumerate(acts))


def squashed(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1)


@pytest.mark.parametrize(
    ("model", "spec"), [("FrozenFirst", SLICES), ("UnlikeBlocks", TWO), long_run("FrozenFirst", TWO)]
)
def test_blocks_that_look_alike(model: str, spec: Any) -> None:
    assert_same_training(Run(f"test_tensor_dropin:{model}"), 2, spec)


class Between(Nano):
    """Code between blocks: what it computes of slices would not be what it computes of the whole."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "drop the sample":
            for block in self.model.blocks:
                block.dropout = DropSample()
            return
        between = {"norm": nn.LayerNorm(WIDTH), "mean": Mean()}[what]
        self.model.forward = lambda x: between_blocks(self.model, between, x)
        self.between = between


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class DropSample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(len(x), 1, 1, device=x.device).round() if self.training else x


def between_blocks(model: Any, between: nn.Module, tokens: Tensor) -> Tensor:
    x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
    for block in model.blocks:
        x = between(block(x))
    return model.head(model.norm(x))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("norm", "the hidden state is read between blocks, with F.layer_norm"),
        ("mean", "the hidden state is read between blocks, with Tensor.mean"),
        ("drop the sample", "draws random numbers that do not belong to positions"),
    ],
)
def test_what_slices_would_change_is_refused(what: str, message: str) -> None:
    run = Run("test_tensor_dropin:Between", model_options=(("what", what),))
    with pytest.raises(RanksFailed, match=message):
        run_ranks(2, train, run, 2, SLICES)


# Models without values


def first_step(deferred: bool, dp_shard_size: int) -> tuple[float, float, dict[str, Tensor]]:
    torch.manual_seed(0)
    with deferred_init() if deferred else nullcontext():
        model = NanoGPT(64, 8, 2, 4, WIDTH)
    assert all(param.is_meta == deferred for param in model.parameters())
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    par = parallelize(model, ParallelLayout(dp_shard_size=dp_shard_size, tp_size=2), example_inputs=(tokens,))
    assert model.head.weight is model.tokens.weight
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    par.finish_backward()
    norm = par.clip_grad_norm_(1.0)
    return loss.item(), norm.item(), in_original_order(model, dict(model.named_parameters()))


@pytest.mark.parametrize("dp_shard_size", [-1, long_run(1)])
def test_a_model_without_values_gets_those_of_an_ordinary_build(dp_shard_size: int) -> None:
    loss, norm, weights = run_ranks(2, first_step, True, dp_shard_size)[0]
    expected = run_ranks(2, first_step, False, dp_shard_size)[0]
    assert (loss, norm) == expected[:2]
    assert all(torch.equal(weights[name], value) for name, value in expected[2].items())
