"""Small models of many architectures, and what their block plans must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
import transformers
from torch import Tensor, nn

from lightning_par.blocks import BlockPlan, find_blocks
from lightning_par.errors import ParallelConfigError

WIDTH = 16


class MLP(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class OtherBlock(Block):
    pass


class MoEBlock(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class GPT(nn.Module):
    """Nano-GPT: tied embedding and head, a small position embedding, a parameter of its own."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(64, WIDTH),
                "wpe": nn.Embedding(4, WIDTH),
                "h": nn.ModuleList(block() for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.transformer["wte"](x) + self.transformer["wpe"].weight.sum() * self.scale
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class Chain(nn.Module):
    """Any list of modules, called one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(width // stride, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.downsample(x) if hasattr(self, "downsample") else x
        return (skip + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 1), BasicBlock(8, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 2), BasicBlock(16, 1))
        self.layer3 = nn.Sequential(BasicBlock(32, 2), BasicBlock(32, 1))
        self.layer4 = nn.Sequential(BasicBlock(64, 2), BasicBlock(64, 1))
        self.fc = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class Root(nn.Module):
    """What a LightningModule looks like from outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()
        self.val_acc = torchmetrics.MeanMetric()

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=WIDTH, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **SMALL))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",  # the others do not work in float64
    )
    return transformers.MixtralForCausalLM(config)


HUGGING_FACE = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "mixtral": mixtral}


def families(plan: BlockPlan) -> dict[str, list[str]]:
    return {family.class_name: list(family.names) for family in plan.families}


def groups(plan: BlockPlan) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for group in plan.groups:
        found.setdefault(group.label, []).append(list(group.names))
    return found


def message(*args: Any, **options: Any) -> str:
    with pytest.raises(ParallelConfigError) as caught:
        find_blocks(*args, **options)
    return str(caught.value)


def check_partition(model: nn.Module, plan: BlockPlan) -> None:
    """Each parameter lies in one unit, and each unit counts its own, formed in the order of the plan."""
    units = [((name,), None) for name in plan.names] + [(group.names, group.numel) for group in plan.groups]
    taken: Counter[nn.Parameter] = Counter()
    roots = {model.get_submodule(name) for names, _ in units for name in names}
    for names, numel in units:
        own: set[nn.Parameter] = set()
        for name in names:
            inner = [model.get_submodule(name)]
            while inner:
                module = inner.pop()
                own.update(module.parameters(recurse=False))
                inner.extend(child for child in module.children() if child not in roots)
        taken.update(own)
        assert numel in (None, sum(p.numel() for p in own))
        assert all(type(model.get_submodule(name)).forward is not nn.Module.forward for name in names)
    assert max(taken.values()) == 1
    held = sum(p.numel() for p in taken)
    assert plan.total_numel == sum(p.numel() for p in model.parameters()) == held + plan.root_numel
    assert {p for n, p in model.named_parameters() if n in plan.root_parameters}.isdisjoint(taken)
