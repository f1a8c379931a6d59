"""Training scripts of published packages, called as they are."""

from __future__ import annotations

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.compat.harness import BATCH, RANKS, SAMPLES, SEED, Record, batches
from examples.compat.modules import VOCABULARY, integers


def litgpt(strategy: str, ranks: int) -> Record:
    """Run LitGPT's own `pretrain.main`: `torch.compile`, accumulation, clipping, validation, a save.

    Args:
        strategy: For Fabric.
        ranks: The number of processes; one accumulates over the batches of `RANKS`.
    """
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config

    length = 12
    config = Config(
        name="tiny",
        block_size=length,
        n_layer=3,
        n_head=2,
        n_embd=16,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        intermediate_size=40,
        mlp_class_name="LLaMAMLP",
    )
    # LitGPT counts its schedule in batches of a rank, so one process that accumulates would train with other rates.
    rate = 1e-3
    train = TrainArgs(
        global_batch_size=RANKS * BATCH,
        micro_batch_size=BATCH,
        max_tokens=SAMPLES * length,
        max_norm=0.5,
        lr_warmup_steps=None,
        min_lr=rate,
    )
    fabric = RecordingFabric(accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true")
    fabric.launch()
    # Its save reads the command line again, to keep the hyperparameters.
    command = mock.patch.object(sys, "argv", ["litgpt", "pretrain", config.name])
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr), command:
        pretrain.main(
            fabric=fabric,
            devices=ranks,
            seed=SEED,
            initial_checkpoint_dir=None,
            resume=False,
            config=config,
            data=TokenData(length, ranks),
            out_dir=Path(fabric.broadcast(folder)),
            tokenizer_dir=None,
            tokenizer=None,
            train=train,
            eval=EvalArgs(max_iters=1),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": rate, "eps": 1e-4}},
        )
        fabric.barrier()
    assert fabric.module is not None
    fabric.record.take_weights(fabric.module)
    return fabric.record


class TokenData(pl.LightningDataModule):
    """What LitGPT asks of its data modules.

    Fabric gives the ranks a distributed sampler. One process takes the same batches, so that both round alike: Fabric
    hands what a forward returns to the script in fp32, and so the mean of each batch is one of fp32 numbers.
    """

    def __init__(self, length: int, ranks: int) -> None:
        super().__init__()
        self.samples = list(integers(VOCABULARY, length + 1))
        self.ranks = ranks

    def connect(self, **options: Any) -> None:
        self.batch_size = options["batch_size"]

    def setup(self, stage: str = "") -> None:
        pass

    def train_dataloader(self) -> DataLoader[Tensor]:
        if self.ranks == 1:
            return DataLoader(self.samples, batch_sampler=batches(None))
        return DataLoader(self.samples, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.samples, batch_size=self.batch_size)


class RecordingFabric(Fabric):
    """Keeps what a script computes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.record = Record()
        self.module: nn.Module | None = None

    def init_module(self, empty_init: bool | None = None) -> Any:
        # LitGPT initialises the weights after this context, which is refused for a model on the meta device.
        return super().init_module(empty_init=False)

    def setup(self, module: nn.Module, *optimizers: Any, **options: Any) -> Any:
        self.module = module
        return super().setup(module, *optimizers, **options)

    def clip_gradients(self, module: Any, optimizer: Any, **options: Any) -> Tensor | None:
        assert self.module is not None
        self.record.take_gradients(self.module, optimizer)
        return super().clip_gradients(module, optimizer, **options)

    def backward(self, tensor: Tensor, *args: Any, **options: Any) -> None:
        # The script divides by its accumulation steps.
        self.record.losses.append(float(tensor.detach()) * RANKS / self.world_size)
        super().backward(tensor, *args, **options)
