"""LightningModules whose structure or whose steps are out of the ordinary, yet correct in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from lightning_par.parallel.shards import full_tensor
from models import GPT, LENGTH, VOCABULARY, Block, NanoGPT

WIDTH = 16


class Nested(NanoGPT):
    """A LightningModule inside a LightningModule, whose own step computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NanoGPT(layers=2)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) + 0.3 * self.inner.loss(batch)


class ThreeNames(NanoGPT):
    """One weight under three names, one of them outside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.readout = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.readout.weight = self.model.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x) + self.model.positions
        for block in self.model.blocks:
            h = block(h)
        return self.model.head(self.model.norm(h)) + self.readout(h.flip(-1))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.sin()


class Parametrized(NanoGPT):
    """Weights computed from others: in blocks and beside them, in the new form and in the old one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            parametrize.register_parametrization(block.out, "weight", Doubled())
            parametrizations.weight_norm(block.mlp[0])
            torch.nn.utils.weight_norm(block.mlp[2])
        self.extra = parametrizations.weight_norm(nn.Linear(VOCABULARY, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(super().forward(x))


class Shared(NanoGPT):
    """Each block runs twice, and the whole model runs twice in a step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x) + self.model.positions
        for block in [*self.model.blocks, *self.model.blocks]:
            h = block(h)
        return self.model.head(self.model.norm(h))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = self(batch[0]), self(batch[0].flip(1))
        return super().loss(batch) + F.mse_loss(first, second)


class Hooked(NanoGPT):
    """Hooks of the user on modules and on parameters; what they see enters the loss, what they change the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        block = self.model.blocks[1]
        block.mlp.register_forward_hook(lambda module, args, output: self.seen.append(output))
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        block.out.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.9,))
        block.qkv.weight.register_hook(lambda grad: grad * 3)
        self.scale.register_hook(lambda grad: grad * 2)
        self.model.norm.weight.register_hook(lambda grad: grad.clamp(max=0))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen.clear()
        return super().loss(batch) + sum(x.pow(2).mean() for x in self.seen)


class LateHook(NanoGPT):
    """A gradient hook that is set when the parameters may be sharded already."""

    def on_fit_start(self) -> None:
        self.model.blocks[0].out.weight.register_hook(lambda grad: grad * 3)
        self.scale.register_hook(lambda grad: grad * 2)


class Compiled(NanoGPT):
    """Parts that the user has compiled: one block, and a module beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1].mlp = torch.compile(self.model.blocks[1].mlp, backend="eager")
        self.adapter = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        h = self.adapter(self.model.tokens(x) + self.model.positions)
        for block in self.model.blocks:
            h = block(h)
        return self.model.head(self.model.norm(h))


class InConfigureModel(NanoGPT):
    """Built in `configure_model`, as Lightning recommends for large models."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = GPT(WIDTH, 3)
            self.scale = nn.Parameter(torch.ones(3))


class Rebuilt(InConfigureModel):
    """Lightning calls `configure_model` for each fit, and this one does not ask whether it was called before."""

    def configure_model(self) -> None:
        self.model = None
        super().configure_model()


class Marked(NanoGPT):
    """Attributes on parameters decide how they are optimised."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.no_decay = True  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        marked = [p for p in self.parameters() if getattr(p, "no_decay", False)]
        others = [p for p in self.parameters() if not getattr(p, "no_decay", False)]
        groups = [{"params": others, "weight_decay": 0.3}, {"params": marked, "weight_decay": 0.0}]
        assert len(marked) == 7
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


class Listed(NanoGPT):
    """Keeps parameters in plain attributes, from which it makes its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        blocks = list(self.model.blocks.parameters())
        ids = {id(p) for p in blocks}
        self.groups = {"slow": [p for p in self.parameters() if id(p) not in ids], "fast": blocks}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rates = {"slow": 1e-3, "fast": 1e-2}
        groups = [{"params": params, "lr": rates[name]} for name, params in self.groups.items()]
        return torch.optim.AdamW(groups, eps=1e-4)


class Penalty(NanoGPT):
    """Looks at its parameters in the step, as a weight penalty does."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum(self.whole(p.pow(2).sum()) for p in self.parameters())
        return super().loss(batch) + 0.01 * penalty

    def whole(self, value: Tensor) -> Tensor:
        return value


class LatePenalty(Penalty):
    """The penalty follows the forward."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = NanoGPT.loss(self, batch)
        return loss + 0.01 * sum(self.whole(p.pow(2).sum()) for p in self.parameters())


class WholePenalty(Penalty):
    """The same, written for sharded parameters."""

    def whole(self, value: Tensor) -> Tensor:
        return full_tensor(value)


class Experts(nn.Module):
    """Runs one of several branches of equal shapes; which one depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return x + self.branches[branch](self.norm(x)).tanh()


class Branching(NanoGPT):
    """Parameters of blocks and beside them that are used for some batches only, for other ones on each rank; and never.

    The weight decay of AdamW shows which parameters had a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Experts() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(4))

    def branch(self, batch: tuple[Tensor, Tensor]) -> int:
        return int(batch[0].sum()) % 3

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        branch = self.branch(batch)
        h = self.model.tokens(batch[0]) + self.model.positions
        for i, expert in enumerate(self.experts):
            h = expert(h, (branch + i) % 3)
        if branch:
            h = self.heads[branch - 1](h)
        return F.cross_entropy(self.model.head(h).flatten(0, 1) * self.scale.prod(), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


class LayerDrop(NanoGPT):
    """All ranks leave out the same block, another one in each step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x) + self.model.positions
        for i, block in enumerate(self.model.blocks):
            if i != self.global_step % 3:
                h = block(h)
        return self.model.head(self.model.norm(h))

    configure_optimizers = Branching.configure_optimizers


class Skipping(NanoGPT):
    """Ranks leave out different blocks, from a step on."""

    def __init__(self, from_step: int, skip: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.from_step = from_step
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.tokens(x) + self.model.positions
        for i, block in enumerate(self.model.blocks):
            if self.global_step < self.from_step or not self.skip(i, self.global_rank):
                h = block(h)
        return self.model.head(self.model.norm(h))


class LoRALinear(nn.Module):
    """Hu et al. 2021, arXiv:2106.09685: a frozen matrix and a trained low-rank change of it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class LoRA(NanoGPT):
    """A frozen model with adapters in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.model.blocks:
            block.qkv = LoRALinear(block.qkv)
            block.mlp[0] = LoRALinear(block.mlp[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)


class Unfreezing(NanoGPT):
    """Whole blocks and the embedding are frozen at first, and trained from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList([self.model.blocks[0], self.model.tokens])
        self.frozen.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.frozen.requires_grad_(self.global_step > 0)


__all__ = ["LENGTH", "Block"]


T = TypeVar("T")


class Layer(ABC):
    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class AbstractBlock(Layer, Block):
    def forward(self, x: Tensor) -> Tensor:
        return super(Layer, self).forward(x)


class ParametrisedBlock(Generic[T], AbstractBlock):
    pass


class AbstractFirst(Layer, NanoGPT):
    """Blocks and a LightningModule whose first base has no `__dict__`."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (AbstractBlock, ParametrisedBlock, ParametrisedBlock[int])
        self.model.blocks = nn.ModuleList(kind(WIDTH, 2) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        return NanoGPT.forward(self, x)


class InputGradients(NanoGPT):
    """A loss of gradients, as forces or a gradient penalty are: a backward that another one goes through."""

    graph = True

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = self.model.tokens(batch[0]) + self.model.positions
        error, slope = self.slope(h, batch[1])
        if not self.graph:
            # A step against the slope, in which no gradient goes back.
            return self.slope(h + slope.detach().sign() * 0.01, batch[1])[0]
        return error + slope.pow(2).sum() + 0.1 * self.slope(h.flip(-1), batch[1])[1].sin().sum()

    def slope(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = h
        # The other kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for block in self.model.blocks:
                out = block(out)
            error = F.cross_entropy(self.model.head(self.model.norm(out)).flatten(0, 1), y.flatten())
            return error, torch.autograd.grad(error, h, create_graph=self.graph, retain_graph=True)[0]


class Adversarial(InputGradients):
    """A backward inside the step whose result has no graph."""

    graph = False
