"""Optimizers under every layout: they train as in one process, and go on from a checkpoint as if never stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from parity import LAYOUTS
from probe import Probe, each_layout, part, same, strategy_of, trainer, weights
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.testing import run_ranks

GLOBAL_BATCH = 4


def batches(steps: int) -> Any:
    """The samples of a rank; whatever the layout, a step sees the same ones, and the loss is their mean."""
    return part(steps * GLOBAL_BATCH, GLOBAL_BATCH // dist.get_world_size())


class Mixed(Probe):
    """Has parameters that are cut, one of which a rank gets nothing, and a 0-dim one that stays plain."""

    def __init__(self, optimizer: str, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for p in self.parameters():
            nn.init.uniform_(p, -0.7, 0.7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.optimizer = optimizer

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) * self.scale

    def loss(self, batch: Any, stage: str) -> Tensor:
        # Of the size of one, for which the learning rates are.
        return super().loss(batch, stage) / 30

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self)


def over(make: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda module: make(module.parameters(), **options)


def groups(module: nn.Module) -> Optimizer:
    """Other rates for some parameters, one of them plain, and another decay for matrices."""
    named = dict(module.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    rest = [p for name, p in named.items() if p.ndim == 1]
    given: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [named["scale"]], "lr": 0.003},
        {"params": rest, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(given, lr=0.02, weight_decay=0.0, eps=1e-4)


def huggingface_adafactor(module: nn.Module) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(module.parameters(), lr=None, eps=(1e-8, 1e-3), relative_step=True, warmup_init=False)


ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-4}  # The eps of design section 7: gradients that are zero stay noise.

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": over(torch.optim.SGD, lr=0.05),
    "SGD foreach": over(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": over(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, fused=True),
    "AdamW": over(torch.optim.AdamW, foreach=False, **ADAM),
    "AdamW foreach": over(torch.optim.AdamW, foreach=True, amsgrad=True, **ADAM),
    "AdamW fused": over(torch.optim.AdamW, fused=True, **ADAM),
    "Adam of a tensor rate": over(torch.optim.Adam, lr=torch.tensor(0.02), eps=1e-4),
    "Adagrad": over(torch.optim.Adagrad, lr=0.05, eps=1e-4, foreach=True),
    "Adagrad fused": over(torch.optim.Adagrad, lr=0.05, eps=1e-4, fused=True),
    "RMSprop": over(torch.optim.RMSprop, lr=0.01, eps=1e-2, centered=True, momentum=0.9, foreach=True),
    "Adadelta": over(torch.optim.Adadelta, lr=1.0, eps=1e-3, foreach=True),
    "Adamax": over(torch.optim.Adamax, foreach=True, **ADAM),
    "NAdam": over(torch.optim.NAdam, foreach=True, **ADAM),
    "RAdam": over(torch.optim.RAdam, foreach=True, **ADAM),
    "ASGD": over(torch.optim.ASGD, lr=0.05, t0=1, foreach=True),
    "Rprop": over(torch.optim.Rprop, lr=0.01),
    "Adafactor": over(torch.optim.Adafactor, lr=0.05),
    "Adafactor foreach": over(torch.optim.Adafactor, lr=0.05, foreach=True),
    "Adafactor of Hugging Face": huggingface_adafactor,
    "groups": groups,
}


# What a quick run has under each layout; the long run has all of them.
TYPICAL = ("SGD", "AdamW fused", "Adafactor", "groups")


# -- modules with more than one optimizer, or one from before sharding ----------------------------------------------


class Gan(Mixed):
    """Two optimizers by hand: gradients of the other part are switched off, and one of them accumulates two losses."""

    def __init__(self, seed: int) -> None:
        super().__init__("AdamW", seed)
        self.critic = Mixed("SGD", seed + 10)
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[Optimizer]:
        own = [p for name, p in self.named_parameters() if not name.startswith("critic.")]
        return [torch.optim.AdamW(own, **ADAM), torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        with critic.toggle_model(sync_grad=False):
            self.manual_backward((self.critic(batch) - 1).square().mean())
        with critic.toggle_model():
            self.manual_backward(self.critic(self(batch).detach()).square().mean())
            critic.step()
            critic.zero_grad()
        self.toggle_optimizer(generator)
        assert not any(p.requires_grad for p in self.critic.parameters())
        self.manual_backward((self.critic(self(batch)) - 1).square().mean())
        assert all(p.grad is None for p in self.critic.parameters())
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)


class ByShape(Mixed):
    """Muon for the matrices of the blocks, whose step multiplies whole matrices, and AdamW for the rest."""

    def __init__(self, seed: int) -> None:
        super().__init__("AdamW", seed)
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[Optimizer]:
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if not any(p is m for m in matrices)]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, **ADAM)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Early(Mixed):
    """Hands out an optimizer that it made when it was built, and that has done a step already where `stepped`."""

    def __init__(self, name: str, seed: int, stepped: bool) -> None:
        super().__init__(name, seed)
        # Nobody converts the state that the optimizer has by now.
        self.double()
        self._early = super().configure_optimizers()
        if stepped:
            self.loss(torch.arange(1.0, 5.0), "early").backward()
            self._early.step()
            self._early.zero_grad()

    def configure_optimizers(self) -> Optimizer:
        return self._early


MODULES: dict[str, Callable[[int], Mixed]] = {
    "GAN": Gan,
    "Muon and AdamW": ByShape,
    "early": lambda seed: Early("AdamW foreach", seed, stepped=False),
    "early with state": lambda seed: Early("AdamW foreach", seed, stepped=True),
    "early with factored state": lambda seed: Early("Adafactor", seed, stepped=True),
    "early groups with state": lambda seed: Early("groups", seed, stepped=True),
}


# -- the same training, through a checkpoint ------------------------------------------------------------------------


def fit(layout: str, name: str, seed: int, **options: Any) -> Any:
    module, path = MODULES[name](seed) if name in MODULES else Mixed(name, seed), options.pop("ckpt_path", None)
    trainer(strategy_of(layout), **options).fit(module, batches(2), ckpt_path=path)
    return module


def straight(names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The weights of two epochs in one process."""
    return {name: weights(fit("one", name, 1, max_epochs=2)) for name in names}


def resumed(names: Iterable[str], layout: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """The weights of a second epoch that another module goes on with, from the checkpoint of the first."""
    found = {}
    for name in names:
        path = f"{folder}/{name}.ckpt"
        fit(layout, name, 1).trainer.save_checkpoint(path)
        found[name] = weights(fit(layout, name, 2, max_epochs=2, ckpt_path=path))
    return found


@functools.cache
def in_one_process(names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    return run_ranks(1, straight, names)[0]


def assert_resumed_as_never_stopped(names: Iterable[str], layout: str, folder: Path) -> None:
    names = tuple(names)
    expected = in_one_process(names)
    found = run_ranks(LAYOUTS[layout][0], resumed, names, layout, str(folder))
    assert not [(name, r) for r, mine in enumerate(found) for name in names if not same(mine[name], expected[name])]


@each_layout
def test_typical_optimizers_train_and_resume(layout: str, tmp_path: Path) -> None:
    assert_resumed_as_never_stopped(TYPICAL, layout, tmp_path)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "fsdp" else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_all_optimizers_train_and_resume(layout: str, tmp_path: Path) -> None:
    assert_resumed_as_never_stopped(OPTIMIZERS.keys() - TYPICAL, layout, tmp_path)


@each_layout
def test_several_optimizers_and_early_ones(layout: str, tmp_path: Path) -> None:
    assert_resumed_as_never_stopped(MODULES, layout, tmp_path)
