"""One block of many models, with the arguments it is called with in the model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_par.parallel._compat import leaves, map_tensors
from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor import BlockTensorPlan, plan_block
from lightning_par.parallel.tensor.verify import InDouble
from models import Block as NanoBlock

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.nanogpt.model import Block as ExampleBlock

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, FFN, TOKENS = 32, 4, 2, 8, 48, 6


class Case(NamedTuple):
    """A block and the arguments of one call."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def captured(model: nn.Module, name: str, *args: Any, **inputs: Any) -> Case:
    """The block of that name with the arguments that the model calls it with."""
    block = model.get_submodule(name)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model.eval()(*args, **inputs)
    handle.remove()
    args, kwargs = seen[0]
    kwargs = {key: value for key, value in kwargs.items() if key not in ("use_cache", "past_key_values", "cache")}
    return Case(block, args, kwargs)


def randomised(case: Case) -> Case:
    """Give each parameter a value of its own: ones and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(3)
    for param in case.block.parameters():
        param.data = param.data + 0.3 * torch.randn(param.shape, generator=generator)
    return case


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))


SIZES = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "attn_implementation": "sdpa",
}
GQA = {**SIZES, "num_key_value_heads": KV_HEADS}


def causal(kind: str, **options: Any) -> Case:
    config = getattr(transformers, f"{kind}Config")(**(GQA | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return captured(model, "model.layers.1", tokens(), use_cache=False)


def nano() -> Case:
    return Case(NanoBlock(WIDTH, HEADS), (torch.randn(2, TOKENS, WIDTH),), {})


class SizedAttention(nn.Module):
    """Takes batch, length and width from its input, as many implementations of GPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = (part.view(b, t, self.heads, c // self.heads) for part in self.qkv(x).split(self.width, dim=2))
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class SizedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = SizedAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, FFN), nn.GELU(), nn.Linear(FFN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def sized() -> Case:
    return Case(SizedBlock(), (torch.randn(2, TOKENS, WIDTH),), {})


def example() -> Case:
    return Case(ExampleBlock(WIDTH, HEADS, 0.0), (torch.randn(2, TOKENS, WIDTH),), {})


def llama(**options: Any) -> Case:
    return causal("Llama", **options)


def qwen3() -> Case:
    return causal("Qwen3", head_dim=HEAD_SIZE)


def mistral() -> Case:
    return causal("Mistral", head_dim=HEAD_SIZE)


def gemma2() -> Case:
    return causal("Gemma2", head_dim=HEAD_SIZE, attn_implementation="eager")


def phi3() -> Case:
    return causal("Phi3", pad_token_id=0)


def mixtral() -> Case:
    return causal("Mixtral", num_local_experts=4, experts_implementation="eager")


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, bos_token_id=0, eos_token_id=0
    )
    return captured(transformers.GPT2LMHeadModel(config), "transformer.h.1", tokens(), use_cache=False)


def bert() -> Case:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, max_position_embeddings=16))
    return captured(model, "bert.encoder.layer.1", tokens())


def vit() -> Case:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))
    name = next(name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer")
    return captured(model, name, torch.randn(2, 3, 8, 8))


def t5(name: str) -> Case:
    config = transformers.T5Config(
        vocab_size=64, d_model=WIDTH, d_kv=HEAD_SIZE, d_ff=FFN, num_layers=2, num_heads=HEADS
    )
    model = transformers.T5ForConditionalGeneration(config)
    return captured(model, name, input_ids=tokens(), decoder_input_ids=tokens(), use_cache=False)


def t5_encoder() -> Case:
    return t5("encoder.block.1")


def t5_decoder() -> Case:
    return t5("decoder.block.0")


def torch_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, batch_first=True)
    return Case(layer.eval(), (torch.randn(2, TOKENS, WIDTH),), {})


CASES: dict[str, Callable[[], Case]] = {
    "nano": nano,
    "sized": sized,
    "example": example,
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "phi3": phi3,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5_encoder": t5_encoder,
    "t5_decoder": t5_decoder,
    "torch_encoder": torch_encoder,
}


def make(name: str) -> Case:
    torch.manual_seed(0)
    return randomised(CASES[name]())


@functools.cache
def planned(name: str, tp_size: int = 2) -> BlockTensorPlan:
    """The plan of that block, found once in a process."""
    case = make(name)
    return plan_block(case.block, case.args, case.kwargs, tp_size, use_cache=False)


def in_double(case: Case) -> Case:
    args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (case.args, case.kwargs))
    return Case(case.block.double().eval(), args, kwargs)


def step(block: nn.Module, case: Case) -> dict[str, Tensor]:
    """Outputs, the gradient of the input, and the weights after a step of gradient descent at rate 1."""
    first = next(i for i, arg in enumerate(case.args) if isinstance(arg, Tensor))
    args = list(case.args)
    args[first] = args[first].detach().clone().requires_grad_()
    generator = torch.Generator().manual_seed(5)
    with InDouble():
        outputs = [leaf for leaf in leaves(block(*args, **case.kwargs)) if isinstance(leaf, Tensor)]
        sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs).backward()
    with torch.no_grad():
        for param in block.parameters():
            if param.grad is not None:
                param -= param.grad
    found = {f"output {i}": leaf.detach() for i, leaf in enumerate(outputs)}
    found["input gradient"] = args[first].grad
    return found | {key: full_tensor(value) for key, value in block.state_dict().items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    assert all(type(value) is Tensor for value in found.values())
    return max(((found[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in expected)


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
