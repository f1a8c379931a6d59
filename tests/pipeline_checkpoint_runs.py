"""Runs that are saved under one layout with or without a pipeline and go on under another one."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader

from lightning_par.checkpoint import optimizer_state, stage_state
from lightning_par.parallel.shards import full_tensor
from models import LENGTH, VOCABULARY, Block, NanoGPT, Tokens
from parity import build_strategy, make_trainer

PP: dict[str, Any] = {"pp_size": 2, "dp_shard_size": 1, "pp_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one process": (1, None),
    "single": (1, {"dp_shard_size": 1}),
    "fsdp": (2, {}),
    "tp": (2, {"dp_shard_size": 1, "tp_size": 2}),
    "pp": (2, PP),
    "gpipe": (2, PP | {"pp_schedule": "GPipe"}),
    "interleaved": (2, PP | {"pp_schedule": "Interleaved1F1B", "pp_stages_per_rank": 2}),
    "zbv": (2, PP | {"pp_schedule": "ZBVZeroBubble", "pp_stages_per_rank": 2}),
    "pp x fsdp": (4, PP | {"dp_shard_size": 2}),
    "pp x ddp": (4, PP | {"dp_replicate_size": 2}),
    "pp x tp": (4, PP | {"tp_size": 2}),
}


class OffsetBlock(Block):
    """Has a persistent buffer, and a number beside it."""

    def __init__(self) -> None:
        super().__init__(16, 2)
        self.register_buffer("offset", torch.randn(16) * 0.1)
        self.factor = float(torch.rand(()))

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.factor * self.offset


class Staged(NanoGPT):
    """Tied embedding and head, a frozen parameter in two blocks, two parameter groups, a metric that is saved."""

    def __init__(self, seed: int = 3, groups: str = "decay") -> None:
        torch.manual_seed(seed)
        super().__init__(layers=4)
        self.model.blocks = nn.ModuleList(OffsetBlock() for _ in range(4))
        for block in (self.model.blocks[0], self.model.blocks[3]):
            block.qkv.weight.requires_grad_(False)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=VOCABULARY)
        self.accuracy.persistent(True)
        self.groups = groups
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.scale.prod()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x).flatten(0, 1)
        self.accuracy(logits, y.flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        loss = nn.functional.cross_entropy(logits, y.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def param_groups(self) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if self.groups == "embedding":  # of which a stage without it has none
            return [
                {"params": [p for name, p in named if "tokens" not in name and "positions" not in name]},
                {"params": [p for name, p in named if "positions" in name], "lr": 1e-3},
                {"params": [p for name, p in named if "tokens" in name], "lr": 2e-3},
            ]
        return [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.param_groups(), lr=1e-2, eps=1e-4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"},
        }


def strategy_of(layout: str, host: str = "trainer", **more: Any) -> Any:
    options = LAYOUTS[layout][1]
    if options is None:
        return "auto"
    return build_strategy(("MeshStrategy", {"blocks": [OffsetBlock]} | options | more), host)


class Batches(list[tuple[Tensor, Tensor]]):
    """A loader without a place: in an epoch that goes on it begins with its first batches."""


def batches() -> Batches:
    """The same batches for each data rank, so that all layouts compute the same."""
    # The second half is like the first one: what a resumed epoch begins with are those that are left.
    return Batches(DataLoader(ConcatDataset([Tokens(4), Tokens(4)]), batch_size=4))


def view(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """What this rank's stages have, as full tensors."""
    state: dict[str, Any] = {name: _full(value) for name, value in stage_state(module).items()}
    for optimizer in optimizers:
        saved = optimizer_state(module, optimizer)
        for name, values in saved["state"].items():
            state |= {f"{name}/{key}": _full(value) for key, value in values.items()}
        state["groups"] = [dict(group) for group in saved["param_groups"]]
    return state


def _full(value: Any) -> Any:
    return full_tensor(value).clone() if isinstance(value, Tensor) else value


class Viewer(ModelCheckpoint):
    """Saves in the middle of the second epoch and at the end of each, and remembers what is where a run begins."""

    def __init__(self, folder: str, begins: list[dict[str, Any]], stop: bool) -> None:
        super().__init__(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
        self.begins = begins
        self.stop = stop

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begins.append(view(pl_module, trainer.optimizers))
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if trainer.global_step == 3 and not self.stop:
            self.begins.append(view(pl_module, trainer.optimizers))


def fit(
    folder: str, layout: str, kind: str, groups: str = "decay", average: bool = False, ckpt_path: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """Train three epochs, or from a checkpoint on; what was at step 3, what is at the end, what was logged."""
    # Plain Lightning loads a checkpoint before it converts the module.
    module = Staged(3 if ckpt_path is None else 17, groups).double()
    begins: list[dict[str, Any]] = []
    options = {} if LAYOUTS[layout][1] is None else {"state_dict_type": kind}
    saver = Viewer(folder, begins, stop=ckpt_path is not None)
    trainer = make_trainer(
        LAYOUTS[layout][0],
        strategy_of(layout, **options),
        max_epochs=3,
        precision="64-true",
        callbacks=[saver, *([EMAWeightAveraging(decay=0.6)] if average else [])],
        enable_checkpointing=True,
    )
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return begins[-1], view(module, trainer.optimizers), metrics


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout][0]


def is_same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=tolerance)


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    # Of the metric the stages before the last have nothing.
    assert [n for n in one if not is_same(one[n], other[n], tolerance) and not n.startswith("accuracy")] == []


def merged(views: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks together; what several of them have must be the same on each."""
    whole: dict[str, Any] = {}
    for one in views:
        assert_same({n: v for n, v in one.items() if n in whole}, {n: v for n, v in whole.items() if n in one})
        whole |= one
    return whole
