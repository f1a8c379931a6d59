"""A GPT written as for one device: nothing in it knows how it will be parallelised."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        width: Size of the residual stream.
        heads: Attention heads; divides the width.
        dropout: Probability of dropping a residual contribution.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape; position `t` sees positions up to `t`."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).flatten(2))


class NanoGPT(LightningModule):
    """Predicts the next token; reports loss and speed, and shows a sample of text when training ends.

    Args:
        vocabulary: Number of tokens; 256 for bytes.
        block_size: Longest sequence.
        layers: Number of blocks.
        heads: Attention heads of a block.
        width: Size of the residual stream.
        dropout: Dropout probability of the residual contributions.
        lr: Highest learning rate.
        weight_decay: Decay of matrices; vectors have none.
        warmup_steps: Optimizer steps until the learning rate is highest; it then follows a cosine down to a tenth.
        prompt: What the sample of text starts with.
        sample_bytes: Length of the sample; 0 shows none.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        block_size: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        prompt: str = "def ",
        sample_bytes: int = 200,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()
        self._last_step_ended = 0.0

    def _initialise(self) -> None:
        # Each block adds twice to the residual stream: the smaller start of what it adds keeps the stream's size.
        added = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=added if name.endswith("_out.weight") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary)."""
        length = tokens.shape[1]
        if length > self.hparams.block_size:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.block_size, {self.hparams.block_size}"
            )
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy of the next token, in nats."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The most likely next token at each position."""
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self._last_step_ended = time.perf_counter()

    def on_validation_end(self) -> None:
        self._last_step_ended = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the tokens per second of the whole job, over the time since the last batch."""
        now = time.perf_counter()
        readers = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        self.log("tok/s", batch[0].numel() * readers / (now - self._last_step_ended), prog_bar=True)
        self._last_step_ended = now

    def on_train_end(self) -> None:
        if "val_loss" in self.trainer.callback_metrics:
            baseline = getattr(self.trainer.datamodule, "unigram_loss", math.nan)
            self.print(f"\nvalidation loss {self.trainer.callback_metrics['val_loss']:.3f} nats/byte", end="; ")
            self.print(f"a unigram model has {baseline:.3f}")
        if self.hparams.sample_bytes:
            text = self.sample(self.hparams.prompt.encode(), self.hparams.sample_bytes)
            self.print(f"\na sample that starts with {self.hparams.prompt!r}:\n{text.decode(errors='replace')}\n")

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int, temperature: float = 0.8) -> bytes:
        """Continue a prompt by `count` bytes; each process computes the same ones, as all take part in each forward."""
        generator = torch.Generator().manual_seed(0)
        training = self.training
        self.eval()
        text = list(prompt)
        for _ in range(count):
            window = torch.tensor([text[-self.hparams.block_size :]], device=self.device)
            logits = self(window)[0, -1].float().cpu() / temperature
            text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        self.train(training)
        return bytes(text)
