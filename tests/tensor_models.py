"""LightningModules of many architectures, small, for runs that divide them over tensor-parallel ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_par.parallel.tensor.verify import InDouble
from tensor_blocks import FFN, GQA, HEADS, SIZES, WIDTH

VOCABULARY = SIZES["vocab_size"]
BLOCKS = 2


class Base(pl.LightningModule):
    """In a run in float64, casts to float32 inside the model become casts to float64, so that nothing is rounded more.

    A recomputation is outside of that.
    """

    in_double = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(input_ids=x, labels=y).loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with InDouble() if self.in_double and self.dtype == torch.float64 else nullcontext():
            loss = self.loss(*batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Causal(Base):
    """A language model of Hugging Face that computes its loss itself, with every default a user would have."""

    def __init__(self, kind: str, in_double: bool = True, **options: Any) -> None:
        config = getattr(transformers, f"{kind}Config")(**(GQA | options))
        super().__init__(getattr(transformers, f"{kind}ForCausalLM")(config))
        self.in_double = in_double


class GPT2(Base):
    def __init__(self) -> None:
        sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": 8}
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
        super().__init__(transformers.GPT2LMHeadModel(config))


class Bert(Base):
    def __init__(self) -> None:
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = transformers.BertConfig(**SIZES, **dropout, max_position_embeddings=16)
        super().__init__(transformers.BertForMaskedLM(config))


class T5(Base):
    def __init__(self) -> None:
        sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": FFN, "num_layers": BLOCKS, "num_heads": HEADS}
        config = transformers.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        super().__init__(transformers.T5ForConditionalGeneration(config))


class ViT(Base):
    """Classifies pictures that are made from the tokens: of 3 patches, so that with the class token 4 can be cut."""

    def __init__(self) -> None:
        sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = transformers.ViTConfig(image_size=(12, 4), patch_size=4, num_labels=8, **sizes, **dropout)
        super().__init__(transformers.ViTForImageClassification(config))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        waves = torch.arange(1, 7, device=x.device)
        pictures = torch.sin(x.double()[:, :, None] * waves).reshape(len(x), 1, 12, 4).expand(-1, 3, -1, -1)
        return self.model(pixel_values=pictures.to(self.dtype), labels=y[:, 0] % 8).loss


class TorchEncoder(Base):
    """torch's own encoder, whose attention computes past its modules."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, dropout=0.0, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.model(self.tokens(x))).flatten(0, 1), y.flatten())


class Nano(Base):
    """The nano-GPT of the example: a fused projection of queries, keys and values, head tied to the embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        from examples.nanogpt.model import NanoGPT

        super().__init__(NanoGPT(VOCABULARY, 8, BLOCKS, HEADS, WIDTH, dropout))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss((x, y))

    def whole_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(*batch)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nano": ("Nano", {}),
    "llama": ("Causal", {"kind": "Llama"}),
    "qwen3": ("Causal", {"kind": "Qwen3", "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Causal", {"kind": "Mistral", "head_dim": 8}),
    "gemma2": ("Causal", {"kind": "Gemma2", "head_dim": 8, "attn_implementation": "eager"}),
    "gpt2": ("GPT2", {}),
    "phi3": ("Causal", {"kind": "Phi3", "pad_token_id": 0}),
    "bert": ("Bert", {}),
    "vit": ("ViT", {}),
    "t5": ("T5", {}),
    "torch_encoder": ("TorchEncoder", {}),
    "mixtral": ("Causal", {"kind": "Mixtral", "num_local_experts": 4, "experts_implementation": "eager"}),
}
