"""Models and LightningModules for pipelines: usual ones with enough blocks, and unusual ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tensor_models import Base, ViT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from models import NanoGPT
from tensor_blocks import HEADS, SIZES, WIDTH

LAYERS = 4


class Nano(NanoGPT):
    """Four blocks, head tied to the embedding, parameters that model and module hold directly."""

    def __init__(self, num_hidden_layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__(layers=num_hidden_layers, dropout=dropout)


class GPT2(Base):
    def __init__(self, num_hidden_layers: int = LAYERS) -> None:
        sizes = {"n_embd": WIDTH, "n_layer": num_hidden_layers, "n_head": HEADS, "n_positions": 8}
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
        super().__init__(transformers.GPT2LMHeadModel(config))


class BertClassifier(Base):
    def __init__(self, num_hidden_layers: int = LAYERS) -> None:
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes = SIZES | {"num_hidden_layers": num_hidden_layers}
        config = transformers.BertConfig(**sizes, **dropout, max_position_embeddings=16, num_labels=5)
        super().__init__(transformers.BertForSequenceClassification(config))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(input_ids=x, attention_mask=(x > 2).long(), labels=y[:, 0] % 5).loss


class ViTClassifier(ViT):
    def __init__(self, num_hidden_layers: int = LAYERS) -> None:
        super(ViT, self).__init__(nn.Identity())
        sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {
            "num_hidden_layers": num_hidden_layers
        }
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = transformers.ViTConfig(image_size=(12, 4), patch_size=4, num_labels=8, **sizes, **dropout)
        self.model = transformers.ViTForImageClassification(config)


# Small chains: what differs is how the blocks are called


class Small(nn.Module):
    """An embedding, blocks that add something to the hidden state, and a head; returns logits."""

    vocabulary, width, layers = 11, 6, 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, self.width)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.layers))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocabulary)

    def block(self) -> nn.Module:
        return Mix(self.width)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(ids))))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


class Mix(nn.Module):
    """Each position sees those before it, so that no two samples or positions are alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        y = x
        for extra in (*more, *named.values()):
            y = y + extra
        return x + self.outer(torch.tanh(self.inner(y)).cumsum(1) / 4)


class PassedEmbedding(Small):
    """The embedding goes to each block."""

    def body(self, x: Tensor) -> Tensor:
        x0 = x
        for block in self.blocks:
            x = block(x, x0)
        return x


class AddedEmbedding(Small):
    """The embedding is added outside of the blocks."""

    def body(self, x: Tensor) -> Tensor:
        x0 = x
        for block in self.blocks:
            x = block(x) + 0.3 * x0
        return x


class OuterResidual(Small):
    """Residual and norm are written around the blocks."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.layer_norm(x + 0.5 * block(x), (self.width,))
        return x


class SkippedScale(Small):
    """The parent holds parameters: a token in front, positions, and a scale between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, self.width))
        self.positions = nn.Parameter(torch.randn(16, self.width))
        self.scales = nn.Parameter(torch.rand(self.layers))

    def body(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions[: x.shape[1]]
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x) * scale
        return x[:, 1:]


class Keyword(Small):
    """Hidden states go by name, beside a mask that depends on no parameter."""

    def block(self) -> nn.Module:
        return KeywordBlock(self.width)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), (ids > 1)[..., None].to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(mask=mask, hidden_states=x)
        return self.head(self.norm(x))


class KeywordBlock(Mix):
    def forward(self, *, hidden_states: Tensor, mask: Tensor) -> Tensor:
        return super().forward(hidden_states, mask)


class Pairs(Small):
    """Blocks take and return a hidden state and a residual, which is None at first, as Mamba does."""

    def block(self) -> nn.Module:
        return PairBlock(self.width)

    def body(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        return x + residual


class PairBlock(Mix):
    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else residual + x
        return super().forward(residual) - residual, residual


class HandedOn(Small):
    """Blocks hand on a mask, and make the positions for the next block: neither depends on a parameter."""

    def block(self) -> nn.Module:
        return HandingBlock(self.width)

    def body(self, x: Tensor) -> Tensor:
        mask, positions = x.new_ones(x.shape[:2], dtype=torch.bool), torch.arange(x.shape[1], device=x.device)
        mask[:, -1] = False
        for block in self.blocks:
            x, mask, positions = block(x, mask, positions)
        return x * (positions[:, None] + 1)


class HandingBlock(Mix):
    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x) * mask[..., None] + positions[:, None] / 10, mask, (positions + 1) % 3


class Checkpointed(Small):
    """Calls its blocks in checkpoints of its own."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedResidual(Small):
    """What a checkpoint is called with is made between the blocks."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda hidden, block=block: hidden + block(hidden), 0.5 * x, use_reentrant=False)
        return x


class Outputs(Small):
    """Blocks return a container of Hugging Face, with a number beside the tensors."""

    def block(self) -> nn.Module:
        return OutputBlock(self.width)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).last_hidden_state
        return x


class OutputBlock(Mix):
    def forward(self, x: Tensor) -> Any:
        return BaseModelOutput(last_hidden_state=super().forward(x), attentions=(x.new_zeros(len(x), 2), 3))


class Families(Small):
    """Two kinds of blocks alternate."""

    def __init__(self) -> None:
        super().__init__()
        for i in (1, 3):
            self.blocks[i] = OtherMix(self.width)


class OtherMix(Mix):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(x).sigmoid()


class Halved(Mix):
    """Keeps nothing of its input for backward, so that this may be written over."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.5)


class InPlace(Small):
    """The hidden state is one tensor, written over and over."""

    def block(self) -> nn.Module:
        return Halved(self.width)

    def body(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x += block(x)
        return x


class InPlaceLater(InPlace):
    """The result of the first block is written over by what the others add."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x += block(x)
        return x


class Pooling(Small):
    """A block halves the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = PoolingBlock(self.width)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).repeat_interleave(2, 1)


class PoolingBlock(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(1, (-1, 2)).mean(2)


class ExpandedSamples(Small):
    """Each block takes an expanded tensor: one vector of each sample at all positions."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.cumsum(1)[:, -1:].expand_as(x))
        return x


class Unused(Small):
    """Parameters that the step does not use: in a block, beside the blocks and in the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].idle = nn.Linear(2, 2)
        self.idle = nn.Linear(3, 3)
        self.own = nn.Parameter(torch.ones(2))


class DroppedPrefix(Small):
    """Dropout between the embedding and the first block, and before the head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.2, self.training)
        return self.head(F.dropout(self.norm(self.body(x)), 0.2, self.training))


# What is refused


class UNet(Small):
    """What the first half makes is added in the second one."""

    def body(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[: self.layers // 2]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[self.layers // 2 :]:
            x = block(x + kept.pop())
        return x


class Decides(Small):
    """Python reads the hidden state between two blocks."""

    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2 and x.mean() > 0:
                x = -x
            x = block(x)
        return x


class Twice(Small):
    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class Leaks(Small):
    """A tensor made of the embedding outside any module is used at the end."""

    def body(self, x: Tensor) -> Tensor:
        kept = x.sin()
        return super().body(x) + kept


class FrozenStart(Small):
    """Embedding and first blocks are frozen, as where only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class FrozenButOne(Small):
    """All is frozen but one layer of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.outer.requires_grad_(True)


class Denoise(Small):
    """There is no prefix: blocks take the batch, to which noise was added, and the loss compares with that noise."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.norm, self.head

    def loss(self, batch: Any) -> Tensor:
        noise = torch.randn(batch["noisy"].shape, dtype=batch["noisy"].dtype)
        return F.mse_loss(self.body(batch["noisy"] + noise), noise)


class Autoencoder(Denoise):
    """Blocks take the batch itself, and the loss compares with it."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.body(batch["noisy"]), batch["noisy"])


class Wide(Small):
    """Large enough that its parameters stand out among what else is in memory."""

    width, layers = 96, 4


def samples(rows: int = 8, length: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(Small.vocabulary, (rows, length), generator=generator)
    noisy = torch.randn(rows, length, Small.width, generator=generator, dtype=torch.float64)
    return {"ids": ids, "targets": ids.roll(1, 1), "noisy": noisy}
