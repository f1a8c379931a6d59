"""Optimizers under every layout: they train as in one process, and go on from a checkpoint as if never stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from probe import (
    Probe,
    batches,
    ddp_and_fsdp,
    launched,
    layouts,
    listed,
    long_run,
    same,
    some,
    strategy_of,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from lightning_par.testing import RanksFailed, run_ranks
from parity import LAYOUTS


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
    "LBFGS": over(torch.optim.LBFGS, lr=0.1, max_iter=4, history_size=3),
}


# What a quick run has under each layout; the long run has all of them.
TYPICAL = ("AdamW fused", "Adafactor", "groups")


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
    "early groups with state": lambda seed: Early("groups", seed, stepped=True),
    "early": lambda seed: Early("AdamW foreach", seed, stepped=False),
    "early with state": lambda seed: Early("AdamW foreach", seed, stepped=True),
    "early with factored state": lambda seed: Early("Adafactor", seed, stepped=True),
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


@layouts("fsdp")
def test_typical_optimizers_train_and_resume(layout: str, tmp_path: Path) -> None:
    assert_resumed_as_never_stopped(TYPICAL, layout, tmp_path)


# ZeRO-2 steps as ZeRO-1 does, ddp as one process, and what is particular to hsdp is in the typical ones.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_all_optimizers_train_and_resume(layout: str, tmp_path: Path) -> None:
    assert_resumed_as_never_stopped([n for n in OPTIMIZERS if n not in (*TYPICAL, "LBFGS")], layout, tmp_path)


@pytest.mark.parametrize("layout", some(["ddp", "zero1", "fsdp"], "fsdp"))
@pytest.mark.parametrize("names", [list(MODULES)[:3], long_run(list(MODULES)[3:])], ids=["first", "rest"])
def test_several_optimizers_and_early_ones(layout: str, names: list[str], tmp_path: Path) -> None:
    assert_resumed_as_never_stopped(names, layout, tmp_path)


def refused(layout: str, name: str, host: str) -> None:
    if host == "trainer":
        fit(layout, name, 1)
    else:
        module = Mixed(name)
        launched(strategy_of(layout, host)).setup(module, module.configure_optimizers())


@ddp_and_fsdp
@pytest.mark.parametrize("host", ["trainer", "fabric"])
def test_lbfgs_trains_whole_parameters_and_is_refused_on_shards(layout: str, host: str, tmp_path: Path) -> None:
    if layout != "ddp":
        words = (
            r"ParallelConfigError(?s:.)*LBFGS makes one vector of all parameters, and they are sharded(?s:.)*par_ddp"
        )
        with pytest.raises(RanksFailed, match=words):
            run_ranks(LAYOUTS[layout][0], refused, layout, "LBFGS", host)
    elif host == "trainer":
        assert_resumed_as_never_stopped(["LBFGS"], layout, tmp_path)


# -- Fabric ---------------------------------------------------------------------------------------------------------

FABRIC: dict[str, Callable[[int], Mixed]] = {
    "groups": lambda seed: Mixed("groups", seed),
    "factored with state": lambda seed: Early("Adafactor", seed, stepped=True),
    "plain": lambda seed: Mixed("SGD", seed),
    "factored": lambda seed: Mixed("Adafactor", seed),
    "with state": lambda seed: Early("AdamW foreach", seed, stepped=True),
}


def loop(layout: str, name: str, seed: int, epochs: int, load: str = "", save: str = "") -> dict[str, Tensor]:
    """Windows of three batches and one of two; the optimizer is made before the module is sharded."""
    fabric = launched(strategy_of(layout, "fabric"))
    module = FABRIC[name](seed)
    optimizer: Any = module.configure_optimizers()
    model, optimizer = fabric.setup(module, optimizer)
    state = {"model": model, "optimizer": optimizer}
    if load:
        fabric.load(load, state)
    for _ in range(epochs):
        data = list(fabric.setup_dataloaders(batches(5), use_distributed_sampler=False))
        for i, batch in enumerate(data):
            last = i % 3 == 2 or i == len(data) - 1
            # Nested, repeated and switched off again, which all mean the same.
            with fabric.no_backward_sync(model, enabled=not last), fabric.no_backward_sync(model, enabled=not last):
                with fabric.no_backward_sync(model, enabled=last):
                    pass
                fabric.backward(model.training_step(batch, i) / 3)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    if save:
        fabric.save(save, state)
    return weights(module)


def loops(names: list[str], layout: str, folder: str) -> dict[str, list[dict[str, Tensor]]]:
    """The weights after one epoch, and after a second one that goes on from a checkpoint."""
    found = {}
    for name in names:
        path = f"{folder}/{name}.ckpt"
        found[name] = [loop(layout, name, 1, 1, save=path), loop(layout, name, 2, 1, load=path)]
    return found


@functools.cache
def loops_in_one_process(*names: str) -> dict[str, list[dict[str, Tensor]]]:
    [found] = run_ranks(1, uninterrupted_loops, names)
    return found


def uninterrupted_loops(names: Iterable[str]) -> dict[str, list[dict[str, Tensor]]]:
    return {name: [loop("one", name, 1, epochs) for epochs in (1, 2)] for name in names}


@pytest.mark.parametrize("layout", some(["ddp", "zero1", "fsdp"], "fsdp"))
@pytest.mark.parametrize("names", [list(FABRIC)[:2], long_run(list(FABRIC)[2:])], ids=["first", "rest"])
def test_optimizers_of_fabric_train_and_resume(layout: str, names: list[str], tmp_path: Path) -> None:
    for found in run_ranks(LAYOUTS[layout][0], loops, names, layout, str(tmp_path)):
        for name, expected in loops_in_one_process(*names).items():
            assert [same(a, b) for a, b in zip(found[name], expected, strict=True)] == [True, True], name


# -- schedulers -----------------------------------------------------------------------------------------------------


class Scheduled(Mixed):
    """Two optimizers' worth of rates in two groups, which a scheduler changes; all rates are kept, step by step."""

    def __init__(self, scheduler: str, seed: int) -> None:
        super().__init__("groups", seed)
        self.scheduler = scheduler
        self.rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["groups"](self)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.scheduler](optimizer)}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        loss = super().training_step(batch, batch_idx)
        # What a rank sees differs from what the others see.
        self.log("seen", batch.float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        # Rises with the epochs on rank 0 only, and in the mean.
        ranks = dist.get_world_size()
        slope = 2 * ranks - 1 if dist.get_rank() == 0 else -1
        self.log("unsynchronised", float(slope * self.current_epoch), on_step=False, on_epoch=True)
        return loss


def plateau(monitor: str, **options: Any) -> Callable[[Optimizer], dict[str, Any]]:
    def make(optimizer: Optimizer) -> dict[str, Any]:
        return {"scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, **options), "monitor": monitor}

    return make


def each_step(make: Callable[[Optimizer], Any]) -> Callable[[Optimizer], dict[str, Any]]:
    return lambda optimizer: {"scheduler": make(optimizer), "interval": "step"}


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "by epoch": lambda optimizer: schedulers.StepLR(optimizer, 1, gamma=0.5),
    "by step": each_step(lambda optimizer: schedulers.OneCycleLR(optimizer, [0.02, 0.01, 0.03], total_steps=20)),
    "warm-up and cosine": each_step(
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)],
            milestones=[3],
        )
    ),
    "each second step": lambda optimizer: {
        "scheduler": schedulers.ExponentialLR(optimizer, 0.8),
        "interval": "step",
        "frequency": 2,
    },
    # Neither improves: the data is the same in each epoch, and a threshold is never reached.
    "plateau of validation": plateau("val_loss", threshold=0.9),
    "plateau of training": plateau("seen"),
    "plateau of each rank's own": plateau("unsynchronised"),
}


def schedule(layout: str, folder: str) -> dict[str, tuple[list[list[float]], dict[str, Tensor]]]:
    """Rates and weights of three epochs: in one process at once, else resumed after two."""
    found = {}
    for name in SCHEDULERS:
        modules, path = [Scheduled(name, seed) for seed in (1, 2)], f"{folder}/{name}.ckpt"
        if layout == "one":
            trainer("auto", max_epochs=3).fit(modules[0], batches(2), batches(1))
            found[name] = modules[0].rates, weights(modules[0])
            continue
        first = trainer(strategy_of(layout), max_epochs=2)
        first.fit(modules[0], batches(2), batches(1))
        first.save_checkpoint(path)
        trainer(strategy_of(layout), max_epochs=3).fit(modules[1], batches(2), batches(1), ckpt_path=path)
        found[name] = modules[0].rates + modules[1].rates, weights(modules[1])
    return found


@functools.cache
def schedule_in_one_process() -> dict[str, tuple[list[list[float]], dict[str, Tensor]]]:
    return run_ranks(1, schedule, "one", "")[0]


@pytest.mark.parametrize("layout", some(["ddp", "fsdp", "hsdp2x2"], "ddp"))
def test_schedulers_change_the_rates_as_in_one_process(layout: str, tmp_path: Path) -> None:
    for found in run_ranks(LAYOUTS[layout][0], schedule, layout, str(tmp_path)):
        for name, (rates, expected) in schedule_in_one_process().items():
            assert len({tuple(rate) for rate in rates}) > 1, f"{name} does not change the rates"
            assert found[name][0] == [pytest.approx(rate, rel=1e-12) for rate in rates], name
            assert same(found[name][1], expected), name


# -- accumulation ---------------------------------------------------------------------------------------------------

WINDOWS: dict[str, Callable[[], dict[str, Any]]] = {
    "short last window": lambda: {"accumulate_grad_batches": 3},
    "window longer than the epoch": lambda: {"accumulate_grad_batches": 9},
    "from epoch to epoch": lambda: {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})]},
}


def accumulate(layout: str, **options: Any) -> dict[str, tuple[int, dict[str, Tensor]]]:
    found = {}
    for name, make in WINDOWS.items():
        module = Mixed("SGD foreach")
        run = trainer(strategy_of(layout, **options), max_epochs=2, **make())
        run.fit(module, batches(5))
        found[name] = run.global_step, weights(module)
    return found


@functools.cache
def accumulate_in_one_process() -> dict[str, tuple[int, dict[str, Tensor]]]:
    return run_ranks(1, accumulate, "one")[0]


@pytest.mark.parametrize(
    ("layout", "sync"),
    listed(
        [*((layout, "auto") for layout in LAYOUTS), ("zero1", True), ("ddp", False), ("fsdp", False)],
        ("ddp", "auto"),
        ("fsdp", "auto"),
    ),
)
def test_accumulation_with_a_short_last_window(layout: str, sync: Any) -> None:
    for found in run_ranks(LAYOUTS[layout][0], accumulate, layout, sync_every_batch=sync):
        for name, (steps, expected) in accumulate_in_one_process().items():
            assert found[name][0] == steps, name
            assert same(found[name][1], expected), name
