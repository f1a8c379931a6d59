"""Batches of any structure are cut by rows, and what the steps on the parts return is what one step returns."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel._compat import shares_storage
from lightning_par.parallel.pipeline.microbatches import batch_size, merge, sizes, split, weighted

ROWS = 7


def rows(*shape: int) -> Tensor:
    return torch.arange(ROWS * torch.Size(shape).numel(), dtype=torch.float64).reshape(ROWS, *shape)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def read(batch: Any, name: str) -> Tensor:
    value: Tensor = getattr(batch, name) if hasattr(batch, name) else batch[name]
    return value


CONTAINERS: dict[str, Any] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "defaultdict": lambda x, y: defaultdict(list, x=x, y=y),
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "named tuple": Pair,
    "frozen dataclass": Frozen,
    "object": Plain,
}


@pytest.mark.parametrize("build", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_are_cut_by_rows_and_keep_their_class(build: Any) -> None:
    batch = build(rows(2), rows())
    assert batch_size(batch) == ROWS
    parts = split(batch, 3)
    assert all(type(part) is type(batch) for part in parts)
    for name in ("x", "y"):
        assert [len(read(part, name)) for part in parts] == [3, 2, 2]
        assert torch.equal(torch.cat([read(part, name) for part in parts]), read(batch, name))
        assert all(shares_storage(read(part, name), read(batch, name)) for part in parts)
        assert len(read(batch, name)) == ROWS


def test_what_is_not_per_sample_goes_into_each_part() -> None:
    positions, scale, names = torch.arange(5), torch.tensor(2.0), [f"sample {i}" for i in range(ROWS)]
    batch = {
        "ids": rows(5),
        "nested": [rows(), (rows(3, 2), {"mask": rows(5)})],
        "positions": positions,
        "scale": scale,
        "names": names,
        "lengths": list(range(ROWS)),
        "array": np.arange(ROWS),
        "classes": ["cat", "dog"],
        "size": (ROWS, ROWS),
        "epoch": 3,
        "nothing": None,
    }
    first, second = split(batch, 2)
    assert first["names"] + second["names"] == names
    assert first["lengths"] == [0, 1, 2, 3]
    assert second["array"].tolist() == [4, 5, 6]
    assert len(second["nested"][1][1]["mask"]) == 3
    for part in (first, second):
        assert part["positions"] is positions
        assert part["scale"] is scale
        assert (part["classes"], part["size"], part["epoch"], part["nothing"]) == (["cat", "dog"], (7, 7), 3, None)


def test_lists_of_mappings_are_samples_beside_tensors_and_batches_alone() -> None:
    boxes = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (5, 3)]
    images, records = split((torch.zeros(2, 3, 8, 8), boxes), 2)[1]
    assert len(images) == 1
    assert records == [boxes[1]]
    # As many loaders as samples in a part would be cut into loaders.
    several = [{"x": rows()}, {"x": rows()}]
    assert [len(loader["x"]) for loader in split(several, 2)[0]] == [4, 4]
    assert batch_size([{"text": "a"}, {"text": "b"}, {"text": "c"}]) == 3
    assert split(["a", "b", "c"], 2) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(8, 3), "mask": torch.zeros(16, 16)}, r"batch\['x'\] \(8, 3\), batch\['mask'\] \(16, 16\)"),
        ({"table": torch.zeros(4), "x": torch.zeros(8), "y": torch.zeros(8)}, r"ambiguous: batch\['table'\] \(4,\)"),
        ((1, None, torch.tensor(1.0)), "a batch of type tuple has no tensor with rows"),
        ({"x": pack_sequence([torch.zeros(3), torch.zeros(2)])}, "PackedSequence.*\n.*pad the sequences"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        split(batch, 2)


def test_sizes_are_those_of_tensor_split() -> None:
    for size in range(1, 12):
        for parts in range(1, size + 1):
            assert sizes(size, parts) == [len(part) for part in torch.zeros(size).tensor_split(parts)]
    with pytest.raises(ParallelConfigError, match=r"3 samples cannot be cut into 4 micro-batches"):
        split(torch.zeros(3, 2), 4)


def step(x: Tensor, names: list[str]) -> dict[str, Any]:
    """Returns what steps return; the loss is the mean over samples."""
    loss = x.square().mean()
    return {
        "loss": loss,
        "loss_value": loss.item(),
        "logits": x * 2,
        "correct": (x > 4).sum(),
        "count": len(x),
        "batch_idx": 5,
        "names": names,
        "predictions": x.sum(1).tolist(),
        "pair": Pair(x, x.mean()),
        "output": CausalLMOutput(loss=loss, logits=x + 1),
        "frozen": Frozen(x[:, 0], x),
        "version": "v1",
        "flag": torch.tensor(True),
        "nothing": None,
    }


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Frozen):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    else:
        assert one == (pytest.approx(other, rel=1e-13) if isinstance(other, float) else other)


def test_merged_outputs_are_those_of_one_step() -> None:
    x, names = rows(3), [f"sample {i}" for i in range(ROWS)]
    parts = split((x, names), 3)
    merged = merge([step(*part) for part in parts], [size / ROWS for size in sizes(ROWS, 3)])
    same(merged, step(x, names))


def test_merged_outputs_of_weight_zero_are_left_out() -> None:
    nan = torch.tensor(torch.nan)
    assert merge([{"loss": nan}, {"loss": torch.tensor(2.0)}], [0.0, 1.0])["loss"] == 2
    assert merge([torch.nan, 2.0], [0.0, 1.0]) == 2
    assert torch.isnan(weighted([nan, nan], [0.0, 0.0]))
    # With weights of 1 all scalars are sums, as the loss is.
    assert merge([3.0, 3.0], [1.0, 1.0]) == 6


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": 1}, {"b": 1}], r"output is made of \['a'\] in the first micro-batch and \['b'\] in micro-batch 1"),
        ([{"a": torch.zeros(2)}, {"a": None}], r"output\['a'\] is a Tensor in the first .* a NoneType"),
        ([{"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}], r"output\['a'\] is of shape \(2, 3\)"),
        ([(1, "x"), (1, "y")], r"output\[1\] is 'x' in the first micro-batch and 'y'"),
        ([torch.tensor(True), torch.tensor(False)], "output is True in the first micro-batch and False"),
        ([None, torch.zeros(1)], "a NoneType in the first micro-batch and a Tensor in micro-batch 1"),
    ],
)
def test_outputs_that_differ_are_refused_by_name(outputs: list[Any], message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        merge(outputs, [0.5, 0.5])
