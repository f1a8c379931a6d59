"""The weighted losses and gradients of micro-batches are those of the whole batch, however unequal their targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.pipeline.loss_weights import combine, watch_targets
from lightning_par.parallel.pipeline.microbatches import sizes, split, weighted

# Deprecated arguments and broadcast targets are what some tests are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a target size:UserWarning"),
]
ROWS, LENGTH, CLASSES, PARTS = 7, 5, 6, 3
WEIGHT = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0, 0.7], dtype=torch.float64)


def padded_labels(ignored: int = -100) -> Tensor:
    """From 1 to all targets in a row, so that micro-batches have very unequal numbers of them."""
    labels = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for row, count in enumerate([1, 1, 1, 5, 4, 1, 2]):
        labels[row, : LENGTH - count] = ignored
    return labels


def probabilities() -> Tensor:
    x = torch.randn(ROWS, CLASSES, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.softmax(1)


def squares(x: Tensor, y: Tensor) -> Tensor:
    chosen = x.mT[y >= 0]
    return F.mse_loss(chosen, chosen.detach() + y[y >= 0, None])


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "cross entropy": (lambda x, y: F.cross_entropy(x, y), padded_labels()),
    "imported name": (lambda x, y: cross_entropy(x, y), padded_labels()),
    "by keyword": (lambda x, y: F.cross_entropy(target=y, input=x), padded_labels()),
    "ignore_index": (lambda x, y: F.cross_entropy(x, y, ignore_index=0), padded_labels(0)),
    "class weights": (lambda x, y: F.cross_entropy(x, y, WEIGHT), padded_labels()),
    "smoothing": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2), padded_labels()),
    "smoothing and weights": (lambda x, y: F.cross_entropy(x, y, WEIGHT, label_smoothing=0.2), padded_labels()),
    "probabilities": (lambda x, y: F.cross_entropy(x, y, WEIGHT, label_smoothing=0.2), probabilities()),
    "module": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0), padded_labels(0)),
    "nll": (lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, WEIGHT), padded_labels()),
    "nll module": (lambda x, y: nn.NLLLoss()(F.log_softmax(x, 1), y), padded_labels()),
    "flattened": (lambda x, y: F.cross_entropy(x.mT.reshape(-1, CLASSES), y.flatten()), padded_labels()),
    "selected": (lambda x, y: F.cross_entropy(x.mT[y >= 0], y[y >= 0]), padded_labels()),
    "selected squares": (squares, padded_labels()),
    "deprecated spelling": (lambda x, y: F.cross_entropy(x, y, size_average=True), padded_labels()),
    "sum of two in proportion": (lambda x, y: F.cross_entropy(x, y) + F.cross_entropy(2 * x, y), padded_labels()),
}


def logits() -> Tensor:
    x = torch.randn(ROWS, CLASSES, LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.requires_grad_()


def in_parts(loss: Callable[..., Tensor], *batch: Any) -> tuple[Tensor, list[float]]:
    """The loss of a batch, computed on micro-batches."""
    losses, counts = [], []
    for part in split(batch, PARTS):
        with watch_targets() as seen:
            losses.append(loss(*part))
        counts.append(list(seen))
    weights = combine(counts, sizes(ROWS, PARTS))
    return weighted(losses, weights), weights


@pytest.mark.parametrize(("loss", "target"), LOSSES.values(), ids=LOSSES)
def test_weighted_losses_and_gradients_are_those_of_the_batch(loss: Any, target: Tensor) -> None:
    x = logits()
    expected = loss(x, target)
    actual, weights = in_parts(loss, x, target)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(value, x)[0] for value in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)
    # The labels are unequal enough for weights by samples to be wrong.
    assert target.is_floating_point() or abs(weights[0] - 3 / ROWS) > 0.05


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch >= 2.13")
@pytest.mark.parametrize("ignored", [None, 0])
def test_a_fused_head_is_counted_once(ignored: int | None) -> None:
    hidden, head = logits().mT.reshape(ROWS * LENGTH, CLASSES), torch.eye(CLASSES, dtype=torch.float64)
    labels = padded_labels(-100 if ignored is None else ignored)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.linear_cross_entropy(x.flatten(0, 1), head, y.flatten(), ignore_index=ignored, weight=WEIGHT)

    actual, _ = in_parts(loss, hidden.view(ROWS, LENGTH, CLASSES), labels)
    torch.testing.assert_close(actual, loss(hidden.view(ROWS, LENGTH, CLASSES), labels), rtol=1e-12, atol=0)


def test_the_loss_inside_a_hugging_face_model() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).double()
    labels = padded_labels()
    ids = labels.clamp(min=0)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels).loss

    expected = loss(ids, labels)
    actual, _ = in_parts(loss, ids, labels)
    # Such models compute their loss in float32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    by_samples = weighted([loss(*part) for part in split((ids, labels), PARTS)], combine([], [3, 2, 2], "samples"))
    assert not torch.isclose(by_samples, expected, rtol=1e-3)


def test_a_part_without_targets_is_left_out() -> None:
    x, y = logits(), padded_labels()
    y[-2:] = -100
    actual, weights = in_parts(F.cross_entropy, x, y)
    assert weights[-1] == 0
    torch.testing.assert_close(actual, F.cross_entropy(x, y), rtol=1e-12, atol=0)
    nothing = torch.full_like(y, -100)
    actual, weights = in_parts(F.cross_entropy, x, nothing)
    assert weights == [3 / 7, 2 / 7, 2 / 7]
    assert actual.isnan()


def test_counts_are_what_the_mean_divides_by() -> None:
    x, y = logits(), padded_labels()
    with watch_targets() as counts:
        F.cross_entropy(x, y)
        F.cross_entropy(x, y, WEIGHT)
        F.cross_entropy(x, probabilities(), WEIGHT)
        F.cross_entropy(x[0, :, 0], probabilities()[0, :, 0])
        F.mse_loss(x, x[:1].expand_as(x).detach())
    # In proportion to the rows, so that losses with such targets and others go together.
    weights = WEIGHT[y[y >= 0]].sum()
    assert [float(count) for count in counts] == [15, pytest.approx(float(weights)), ROWS * LENGTH, 1, x.numel()]


def test_other_reductions_tell_nothing() -> None:
    for reduction, average in itertools.product(("sum", "none"), (None, False)):
        with watch_targets() as counts:
            F.cross_entropy(logits(), padded_labels(), reduction=reduction, size_average=average)
        assert counts == []
    x, y = logits(), padded_labels()
    losses = [F.cross_entropy(*part, reduction="sum") for part in split((x, y), PARTS)]
    expected = F.cross_entropy(x, y, reduction="sum")
    torch.testing.assert_close(weighted(losses, combine([[]] * PARTS, [3, 2, 2], "sum")), expected, rtol=1e-12, atol=0)


def test_losses_in_different_proportions_are_refused() -> None:
    x, y = logits(), padded_labels()
    with pytest.raises(ParallelConfigError, match=r"3, 9, 3 of one and 15, 10, 10 .*\n.*pp_loss_weight='sum'.*YAML"):
        in_parts(lambda x, y: F.cross_entropy(x, y) + F.mse_loss(x.sum(1), y * 0.1), x, y)
    with pytest.raises(ParallelConfigError, match="different numbers of mean losses, 1, 0"):
        combine([[3], []], [2, 2])
    assert combine([[3, 1], [1, 3]], [2, 2], "samples") == [0.5, 0.5]
    with pytest.raises(ParallelConfigError, match="pp_loss_weight is 'mean', and has to be one of 'auto', 'samples'"):
        combine([], [], "mean")


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("selected", "selected squares", "flattened")])
def test_counting_alone_neither_computes_nor_reads_logits(name: str) -> None:
    loss, target = LOSSES[name]
    with watch_targets() as counts:
        expected = loss(logits(), target)
    # On meta there is nothing to read.
    nan = torch.empty(ROWS, CLASSES, LENGTH, dtype=torch.float64, device="meta")
    with watch_targets(count_only=True) as alone:
        dry = loss(nan, target)
    assert [float(count) for count in alone] == [float(count) for count in counts]
    assert dry.shape == expected.shape
    assert dry.dtype == expected.dtype


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [False, True])
def test_counting_alone_returns_nan_of_the_same_kind(reduction: str, autocast: bool) -> None:
    x, y = logits().detach().bfloat16(), padded_labels()
    calls: list[Callable[[], Tensor]] = [
        lambda: F.cross_entropy(x, y, reduction=reduction),
        lambda: F.cross_entropy(x, x.softmax(1), reduction=reduction),
        lambda: F.cross_entropy(x[0, :, 0], x[1, :, 0].softmax(0), reduction=reduction),
        lambda: F.nll_loss(x, y, reduction=reduction),
        lambda: F.mse_loss(x, x[:1], reduction=reduction),
        lambda: F.l1_loss(x.float(), x, reduction=reduction),
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = call()
            with watch_targets(count_only=True):
                dry = call()
        assert (dry.shape, dry.dtype, dry.device) == (expected.shape, expected.dtype, expected.device)
        assert dry.isnan().all()
        assert math.prod(dry.stride()) == (dry.dim() == 0)
