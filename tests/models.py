"""Ordinary LightningModules, written as for one GPU, and the data they train on."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 31
LENGTH = 8


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random token sequences; sample `i` is the same whoever asks."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.data = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index, :-1], self.data[index, 1:]


def loader(batches: list[list[int]]) -> DataLoader[tuple[Tensor, Tensor]]:
    """A loader of exactly these batches of sample indices."""
    return DataLoader(Tokens(1 + max(i for batch in batches for i in batch)), batch_sampler=batches)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A nano-GPT with tied embedding and head, and a position parameter that the model holds directly."""

    def __init__(self, width: int = 16, layers: int = 3, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NanoGPT(pl.LightningModule):
    """Next-token prediction; also owns a parameter itself (a temperature) that the step uses outside `forward`."""

    def __init__(self, width: int = 16, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = GPT(width, layers, dropout=dropout)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1) * self.scale.prod(), y.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class ShortSteps(NanoGPT):
    """Steps that do not name `batch_idx`; Lightning passes what a step's signature names."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(batch[0]).argmax(-1)


class Llama(pl.LightningModule):
    """Hugging Face Llama, untouched, with the loss computed inside the model."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        self.model = LlamaForCausalLM(config)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    training_step = NanoGPT.training_step
    validation_step = NanoGPT.validation_step
    configure_optimizers = NanoGPT.configure_optimizers


class Sensitive(NanoGPT):
    """An fp32 constant on the residual stream, an fp32 rotary table, GroupNorm and RMSNorm: all work under autocast."""

    def __init__(self) -> None:
        super().__init__()
        width = 16
        self.register_buffer("bias", torch.linspace(-1, 1, width))
        angle = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("rotary", torch.polar(torch.ones_like(angle), angle), persistent=False)
        self.group = nn.GroupNorm(2, width)
        self.rms = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x) + self.model.positions + self.bias
        h = self.group(h.transpose(1, 2)).transpose(1, 2)
        pairs = torch.view_as_complex(h.float().unflatten(-1, (-1, 2)).contiguous())
        h = self.rms(torch.view_as_real(pairs * self.rotary).flatten(-2))
        assert h.dtype == torch.float32
        for block in self.model.blocks:
            h = block(h)
        return self.model.head(self.model.norm(h))


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(NanoGPT):
    """Convolutions with BatchNorm, whose kernel refuses bf16 parameters beside fp32 statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.model.head(h.transpose(1, 2))


MODELS = {"nanogpt": NanoGPT, "short-steps": ShortSteps, "llama": Llama, "sensitive": Sensitive, "convnet": ConvNet}
