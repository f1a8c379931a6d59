"""Divided logits behave as the whole ones: values, gradients, metadata; what they cannot do is refused."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from lightning_par.parallel.tensor._compat import function_name, like_tensor, without_subclasses
from lightning_par.parallel.tensor.logits import (
    DividedLogits,
    Division,
    divide_logits,
    gather_logits,
    report_once,
    whole,
)
from lightning_par.testing import run_ranks

CLASSES = 12
SHAPE = (2, 3, CLASSES)
Op = Callable[[Any, dict[str, Tensor]], Any]


def extras() -> dict[str, Tensor]:
    """Tensors that all ranks hold, and that meet the logits."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"scalar": (), "rows": (2, 3, 1), "bias": (CLASSES,), "same": SHAPE}
    return {
        name: torch.rand(shape, generator=generator, dtype=torch.float64).add_(0.5).requires_grad_()
        for name, shape in shapes.items()
    }


def in_place(x: Tensor, e: dict[str, Tensor]) -> Tensor:
    x = x.clone()
    flat = x.view(-1, CLASSES)
    flat /= 3
    flat.mul_(e["bias"])
    x += 1
    return x


class _Tanh(torch.autograd.Function):
    """A user's own function that keeps what it returns; nothing has to be gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradients[0] * (1 - y * y)


def with_backward_hook(x: Tensor) -> Tensor:
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(x)


ROWS = torch.tensor([[True, False, True], [False, True, True]])
DIVIDED: dict[str, Op] = {
    "add a number": lambda x, e: x + 1,
    "from the left": lambda x, e: 2 - 3 * x,
    "divide": lambda x, e: x / 30,
    "tanh": lambda x, e: torch.tanh(x),
    "soft cap": lambda x, e: torch.tanh(x / 30.0) * 30.0,
    "scalar": lambda x, e: x * e["scalar"],
    "scalar from the left": lambda x, e: e["scalar"] / x.exp(),
    "rows": lambda x, e: x * e["rows"] - e["rows"],
    "bias": lambda x, e: x + e["bias"],
    "bias from the left": lambda x, e: e["bias"] - x,
    "same shape": lambda x, e: x * e["same"],
    "more rows": lambda x, e: x[0] * e["same"],
    "each other": lambda x, e: x * x.tanh() + x[:1],
    "power": lambda x, e: x**2 + 2**x,
    "clamp": lambda x, e: x.clamp(-0.5, 0.7),
    "mask of classes": lambda x, e: x.masked_fill(torch.arange(CLASSES) > 7, -3.0),
    "mask of rows": lambda x, e: torch.where(ROWS[..., None], x, e["scalar"]),
    "in place": in_place,
    "to float32": lambda x, e: x.float().double(),
    "to": lambda x, e: x.to(torch.float32).to(e["bias"]),
    "clone": lambda x, e: x.clone(),
    "contiguous": lambda x, e: x[:, 1:].contiguous().view(-1, CLASSES),
    "view": lambda x, e: x.view(-1, CLASSES),
    "view of the rest": lambda x, e: x.view(6, -1),
    "view of a list": lambda x, e: x.view([3, 2, CLASSES]),
    "reshape": lambda x, e: x[:, 1:].reshape(-1, x.size(-1)),
    "flatten": lambda x, e: x.flatten(0, 1),
    "torch.flatten": lambda x, e: torch.flatten(x, end_dim=-2),
    "shift": lambda x, e: x[..., :-1, :],
    "last token": lambda x, e: x[:, -1],
    "last token of three": lambda x, e: x[:, -1, :],
    "mask": lambda x, e: x[ROWS],
    "mask and all": lambda x, e: x[ROWS, :],
    "numbers": lambda x, e: x[torch.tensor([1, 0, 1])],
    "list": lambda x, e: x[[1, 0]],
    "pairs": lambda x, e: x[torch.tensor([0, 1]), torch.tensor([2, 2])],
    "new dimension": lambda x, e: x[:, None],
    "everything": lambda x, e: x[...],
    "squeeze": lambda x, e: x[:1].squeeze(),
    "squeeze one": lambda x, e: x[:1].squeeze(0),
    "squeeze the classes": lambda x, e: x.squeeze(-1),
    "unsqueeze": lambda x, e: x.unsqueeze(1).unsqueeze(-2),
    "transpose": lambda x, e: x.transpose(0, 1),
    "permute": lambda x, e: x.permute(1, 0, 2),
    "select": lambda x, e: x.select(1, 2).narrow(0, 1, 1),
    "index_select": lambda x, e: torch.index_select(x, 1, torch.tensor([2, 0])),
    "split": lambda x, e: x.split(2, dim=1)[0] + x.chunk(3, 1)[2],
    "unbind": lambda x, e: x.unbind()[1],
    "backward hooks": lambda x, e: with_backward_hook(x) + with_backward_hook(x),
    "a custom function": lambda x, e: _Tanh.apply(x) * 3,
    "rows one by one": lambda x, e: [row * 2 for row in x][1],
}
GATHERED: dict[str, tuple[str, Op]] = {
    "softmax": ("Tensor.softmax", lambda x, e: x.softmax(-1)),
    "log_softmax": ("F.log_softmax", lambda x, e: F.log_softmax(x, -1)),
    "argmax": ("Tensor.argmax", lambda x, e: x.argmax(-1)),
    "transpose": ("Tensor.transpose", lambda x, e: x.transpose(1, 2)),
    "a class": ("Tensor.__getitem__", lambda x, e: x[..., 0]),
    "classes": ("Tensor.__getitem__", lambda x, e: x[..., 2:]),
    "a last dimension": ("Tensor.__getitem__", lambda x, e: x[..., None]),
    "mask of all": ("Tensor.__getitem__", lambda x, e: x[e["same"] > 1]),
    "view of classes": ("Tensor.view", lambda x, e: x.view(2, 3, 4, 3)),
    "flatten all": ("Tensor.flatten", lambda x, e: x.flatten()),
    "sum": ("Tensor.sum", lambda x, e: x.sum()),
    "list of logits": ("torch.stack", lambda x, e: torch.stack([x, x * 2])),
    "permute": ("Tensor.permute", lambda x, e: x.permute(0, 2, 1)),
    "unsqueeze": ("Tensor.unsqueeze", lambda x, e: x.unsqueeze(-1)),
    "matmul": ("Tensor.matmul", lambda x, e: x @ e["bias"]),
    "compare": ("Tensor.__eq__", lambda x, e: x == x.detach()),
    "dropout": ("F.dropout", lambda x, e: F.dropout(x, 0.0)),
    "plain in place": ("Tensor.add_", lambda x, e: torch.ones(SHAPE, dtype=torch.float64).add_(x)),
    "into a buffer": ("Tensor.__setitem__", lambda x, e: into_buffer(x)),
    "gradient penalty": ("Tensor.norm", lambda x, e: x.norm()),
    "nll": ("F.log_softmax", lambda x, e: F.nll_loss(F.log_softmax(x[0], -1), torch.tensor([1, 5, 11]))),
    "probabilities": ("F.cross_entropy of class prob", lambda x, e: F.cross_entropy(x[0], e["same"][0].detach())),
    "middle": ("Tensor.transpose", lambda x, e: F.cross_entropy(x.transpose(1, 2), torch.tensor([[1, 5, 11]] * 2))),
    "a custom function": ("Tensor.exp2", lambda x, e: _Exp2.apply(x)),
}


class _Exp2(torch.autograd.Function):
    """A user's own function: what it gets does not pass `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp2()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.exp2() * 0.6931471805599453


def into_buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros(4, 3, CLASSES, dtype=torch.float64)
    buffer[1:3] = x
    return buffer


def source() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def division(report: Callable[[str], None] = lambda _: None) -> Division:
    assert dist.group.WORLD is not None
    return Division(dist.group.WORLD, CLASSES, report)


def slice_of(tensor: Tensor) -> Tensor:
    here = CLASSES // dist.get_world_size()
    return tensor.narrow(-1, here * dist.get_rank(), here).clone()


def divided(report: Callable[[str], None] = lambda _: None) -> tuple[Tensor, DividedLogits]:
    """The slice of this rank, and logits made of it."""
    local = slice_of(source()).requires_grad_()
    return local, divide_logits(local * 1, division(report))


def compare(op: Op, name: str, told: list[str]) -> Any:
    """Compare a function of divided logits with that of whole ones; returns what it returned."""
    x, theirs, ours = source().requires_grad_(), extras(), extras()
    expected = op(x * 1, theirs)
    local, logits = divided(told.append)
    found = op(logits, ours)
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=0, atol=1e-12, msg=name)
    if not expected.requires_grad:
        return found
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (expected * cotangent).sum().backward()
    (whole(found) * cotangent).sum().backward()
    torch.testing.assert_close(local.grad, slice_of(x.grad), rtol=0, atol=1e-12, msg=name)
    for key, extra in theirs.items():
        assert (extra.grad is None) == (ours[key].grad is None), (name, key)
        if extra.grad is not None:
            torch.testing.assert_close(ours[key].grad, extra.grad, rtol=0, atol=1e-12, msg=f"{name}: {key}")
    return found


def each_function(only: str = "") -> None:
    for name, op in DIVIDED.items():
        told: list[str] = []
        found = compare(op, name, told)
        assert type(found) is DividedLogits, name
        assert not told, (name, told)
        x = source()
        assert found.stride() == op(x, extras()).stride() or "transpose" in name or "permute" in name, name
    for name, (reader, op) in GATHERED.items():
        told = []
        found = compare(op, name, told)
        assert type(found) is Tensor, name
        assert told, name
        assert f"loss parallel is off: the step reads the logits with {reader}" in told[0], told


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_functions_of_the_logits(ranks: int) -> None:
    run_ranks(ranks, each_function)


def metadata() -> None:
    local, logits = divided()
    with CommDebugMode() as mode:
        assert isinstance(logits, Tensor)
        assert torch.is_tensor(logits)
        assert logits.shape == SHAPE
        assert logits.size(-1) == CLASSES
        assert (logits.dim(), logits.ndim, len(logits), logits.numel()) == (3, 3, 2, 72)
        assert logits.stride() == (36, 12, 1)
        assert logits.dtype is torch.float64
        assert logits.is_floating_point()
        assert torch.is_floating_point(logits)
        assert logits.device == torch.device("cpu")
        assert logits.requires_grad
        assert logits.grad_fn is not None
        assert not logits.is_leaf
        assert not logits.detach().requires_grad
        assert {logits: 1}[logits] == 1
        with torch.no_grad():
            assert not (logits * 2).requires_grad
        for text in (repr(logits), str(logits), f"{logits}"):
            assert "DividedLogits(shape=(2, 3, 12)" in text
            assert "6 of 12 classes here" in text
        assert logits.to(torch.float64) is logits
        assert logits._base is None
        assert logits.view(6, -1)._base is not None
    assert mode.get_total_counts() == 0

    # What people do with a result.
    expected = source()
    assert logits.tolist() == expected.tolist()
    assert (logits.detach().cpu().numpy() == expected.numpy()).all()
    assert logits.sum().item() == pytest.approx(expected.sum().item())
    assert torch.equal(copy.deepcopy(logits.detach()), expected)
    data = gather_logits({"a": [logits, 3], "b": (torch.ones(2), logits[0])})
    assert type(data["a"][0]) is Tensor
    assert torch.equal(data["b"][1], expected[0])
    with torch.inference_mode():
        local_again, again = divided()
        assert torch.equal(whole(again.float() * 2), expected.float() * 2)
        loss = F.cross_entropy(again.view(-1, CLASSES), torch.arange(6))
        torch.testing.assert_close(loss, F.cross_entropy(expected.view(-1, CLASSES), torch.arange(6)))

    with pytest.raises(ValueError, match="a slice of 6 of 12 classes"):
        divide_logits(torch.zeros(2, 5), division())


def test_metadata_and_results() -> None:
    run_ranks(2, metadata)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "write classes": lambda x: x.__setitem__((..., 0), 1.0),
    "write rows": lambda x: x.__setitem__(0, 1.0),
    "softmax in place": lambda x: F.relu6(x, inplace=True),
    "fill": lambda x: x.fill_(0),
    "out": lambda x: torch.add(torch.zeros(SHAPE), 1, out=x),
    "bias of another size": lambda x: x.mul_(torch.ones(5)),
    "data": lambda x: setattr(x, "data", torch.zeros(SHAPE)),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "pickle": lambda x: pickle.dumps(x.detach()),
    "save": lambda x: torch.save({"logits": x.detach()}, io.BytesIO()),
    "into reentrant checkpointing": lambda x: checkpoint(torch.tanh, x, use_reentrant=True).sum().backward(),
    "autograd.grad": lambda x: torch.autograd.grad(x.sum(), x),
}


def refusals() -> None:
    for name, function in REFUSED.items():
        _, logits = divided()
        with pytest.raises(RuntimeError, match=r"loss_parallel=False") as caught:
            function(logits)
        assert "divided over ranks" in str(caught.value), name
    _, logits = divided()
    with (
        pytest.raises(RuntimeError, match=r"aten.sum.default reads logits .* loss_parallel=False"),
        without_subclasses(),
    ):
        logits.sum()


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(2, refusals)


LOSSES: dict[str, Op] = {
    "mean": lambda x, e: F.cross_entropy(x.view(-1, CLASSES), targets()),
    "module": lambda x, e: nn.CrossEntropyLoss(ignore_index=3)(x.flatten(0, 1), targets().clamp(min=0)),
    "sum": lambda x, e: F.cross_entropy(x.flatten(0, 1), targets(), reduction="sum"),
    "none": lambda x, e: F.cross_entropy(x.flatten(0, 1), targets(), reduction="none"),
    "smooth": lambda x, e: F.cross_entropy(x.flatten(0, 1), targets(), e["bias"].detach(), label_smoothing=0.1),
    "weights": lambda x, e: nn.CrossEntropyLoss(e["bias"].detach(), reduction="none")(x.flatten(0, 1), targets()),
    "one row": lambda x, e: F.cross_entropy(x[0, 0], torch.tensor(7)),
    "one row, none": lambda x, e: F.cross_entropy(x[0, 0], torch.tensor(7), reduction="none"),
    "keywords": lambda x, e: F.cross_entropy(target=targets(), input=x.flatten(0, 1), ignore_index=-100),
    "scaled": lambda x, e: F.cross_entropy(x.flatten(0, 1) * e["scalar"], targets()) * e["scalar"],
    "chunks": lambda x, e: sum(map(F.cross_entropy, x.flatten(0, 1).chunk(2), targets().chunk(2))),
}


def targets() -> Tensor:
    return torch.tensor([0, 11, 3, -100, 6, 5])


def losses() -> None:
    for name, op in LOSSES.items():
        told: list[str] = []
        with CommDebugMode() as mode:
            found = compare(op, name, told)
        assert type(found) is Tensor, name
        assert not told, (name, told)
        assert not any("gather" in str(kind) for kind in mode.get_comm_counts()), name
    _, logits = divided()
    for wrong, error in (
        (lambda x: F.cross_entropy(x[0], torch.tensor([0, 12, 1])), IndexError),
        (lambda x: F.cross_entropy(x[0], torch.tensor([0, 12])), ValueError),
        (lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 2], dtype=torch.int32)), RuntimeError),
        (lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 2]), reduction="max"), ValueError),
    ):
        for tensor in (source(), logits):
            with pytest.raises(error):
                wrong(tensor)


def test_cross_entropy_gathers_nothing() -> None:
    run_ranks(2, losses)


def under_autocast() -> None:
    for weight in (None, torch.linspace(0.5, 1, CLASSES)):
        x = source()[0].bfloat16().requires_grad_()
        local = slice_of(x.detach()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.cross_entropy(x, torch.tensor([0, 11, 3]), weight, label_smoothing=0.1)
            loss = F.cross_entropy(
                divide_logits(local, division()), torch.tensor([0, 11, 3]), weight, label_smoothing=0.1
            )
        assert loss.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(local.grad, slice_of(x.grad), rtol=2**-7, atol=1e-6)


def test_autocast_computes_the_loss_in_float32() -> None:
    run_ranks(2, under_autocast)


def hooks() -> None:
    x = source().requires_grad_()
    y = x * 1
    seen: list[Tensor] = []
    y.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient * 2)
    (y.tanh().sum() + 0).backward()
    local, logits = divided()
    logits.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient * 2)
    logits.retain_grad()
    (logits.tanh().sum() + 0).backward()
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(local.grad, slice_of(x.grad))
    torch.testing.assert_close(whole(logits.grad), x.grad)
    local, logits = divided()
    logits.register_hook(lambda _: torch.ones(SHAPE, dtype=torch.float64))
    torch.autograd.backward([logits.exp()], [source()])
    assert torch.equal(local.grad, torch.ones_like(local))
    local = slice_of(source()).requires_grad_()
    checkpoint(lambda part: divide_logits(part * 1, division()), local, use_reentrant=True).exp().sum().backward()
    torch.testing.assert_close(local.grad, local.exp())
    local, logits = divided()
    logits.backward(source())
    assert torch.equal(local.grad, slice_of(source()))


def test_hooks_see_the_whole_gradient() -> None:
    run_ranks(2, hooks)


def test_a_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    report = report_once()
    with caplog.at_level(logging.INFO, "lightning_par"):
        for sentence in ("one", "two", "one"):
            report(sentence)
    assert [record.message for record in caplog.records] == ["one", "two"]


def test_the_torch_api_that_this_relies_on() -> None:
    assert function_name(Tensor.argmax) == "Tensor.argmax"
    assert function_name(F.linear) == "F.linear"
    assert function_name(torch.stack) == "torch.stack"
    made = like_tensor(DividedLogits, torch.ones(2, dtype=torch.float16), (3, 4), (4, 1))
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (4, 1), torch.float16)
    # A view made without gradients says that it has one: `_local` cannot ask that.
    x = torch.ones(2, requires_grad=True) * 1
    with torch.no_grad():
        assert x.view(1, 2).requires_grad
