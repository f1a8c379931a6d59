"""Checkpoints of divided models fit every layout, one process too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from probe import listed
from tensor_models import Nano
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.testing import run_ranks
from models import Tokens
from parity import build_strategy, in_original_order, make_trainer

LAYOUTS: dict[str, tuple[int, tuple[str, dict[str, Any]] | None]] = {
    "one process": (1, None),
    "fsdp": (2, ("FSDP2Strategy", {})),
    "ddp": (2, ("DataParallelStrategy", {})),
    "tp": (2, ("TensorParallelStrategy", {"tp_size": 2})),
    "tp 4": (4, ("TensorParallelStrategy", {"tp_size": 4})),
    "ddp x tp": (4, ("MeshStrategy", {"dp_replicate_size": 2, "dp_shard_size": 1, "tp_size": 2})),
    "fsdp x tp": (4, ("MeshStrategy", {"tp_size": 2})),
}


class Scheduled(Nano):
    """A fused projection, a tied head, an optimizer with state and another one with factored state."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def fit(folder: str, layout: str, state_dict_type: str, optimizer: str, ckpt_path: str | None) -> dict[str, Tensor]:
    """Train three epochs, or from a checkpoint to the end of the third; the weights at the end."""
    torch.manual_seed(3 if ckpt_path is None else 17)
    module = Scheduled(optimizer)
    ranks, spec = LAYOUTS[layout]
    strategy: Any = "auto"
    if spec is not None:
        strategy = build_strategy((spec[0], spec[1] | {"state_dict_type": state_dict_type}), "trainer")
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callbacks = [saver] if ckpt_path is None else []
    trainer = make_trainer(
        ranks, strategy, max_epochs=3, precision="64-true", callbacks=callbacks, enable_checkpointing=bool(callbacks)
    )
    # Every rank reads all of it, so that one process computes the same.
    trainer.fit(module, DataLoader(Tokens(8), batch_size=4), ckpt_path=ckpt_path)
    return in_original_order(module, dict(module.named_parameters()))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


CHANGES = [
    ("tp", "one process", "full"),
    ("tp", "fsdp", "sharded"),
    ("fsdp x tp", "tp", "sharded"),
    ("fsdp", "fsdp x tp", "sharded"),
    ("tp", "tp 4", "sharded"),
    ("tp 4", "ddp x tp", "sharded"),
    ("ddp x tp", "one process", "full"),
    ("one process", "tp", "sharded"),
    ("ddp", "tp", "full"),
]
# Factored state has other shapes than its parameters: changes from and to tp, fsdp and both are enough for it.
FACTORED = CHANGES[1:4]


@pytest.mark.parametrize(
    ("optimizer", "there", "here", "state_dict_type"),
    listed(
        [*(("AdamW", *change) for change in CHANGES), *(("Adafactor", *change) for change in FACTORED)],
        ("AdamW", "tp", "fsdp", "sharded"),
    ),
)
def test_training_goes_on_in_another_layout(
    tmp_path: Path, optimizer: str, there: str, here: str, state_dict_type: str
) -> None:
    whole = run_ranks(LAYOUTS[there][0], fit, str(tmp_path), there, state_dict_type, optimizer, None)
    path = str(tmp_path / "epoch=1.ckpt")
    for got in run_ranks(LAYOUTS[here][0], fit, str(tmp_path), here, state_dict_type, optimizer, path):
        # Plain Lightning loads the weights before it converts the module to float64.
        assert_same(got, whole[0], 1e-6 if here == "one process" else 1e-9)
