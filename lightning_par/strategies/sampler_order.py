"""What decides the order of a map-style loader: its samplers, the generators they draw from, and their own state."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_par.checkpoint import ResumableSampler
from lightning_par.checkpoint.sampler import epoch_order
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.strategies import _compat

State = dict[str, Any]


def has_plain_batches(loader: Any) -> bool:
    """Whether batches are consecutive samples of the sampler."""
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def sampler_of(loader: Any) -> Any:
    """The sampler that a loader's batches come from; None if its batch sampler has none."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def geometry(loader: Any) -> State:
    """What has to be the same for the same batches."""
    batches = loader.batch_sampler
    return {
        "length": sized_len(loader.dataset),
        "batch_size": getattr(batches, "batch_size", None),
        "drop_last": bool(getattr(batches, "drop_last", False)),
    }


def describe_order(loader: Any, data_size: int) -> State | None:
    """Describe how to make the order of all ranks again, in plain types; None where the ranks' parts are not known."""
    sampler = sampler_of(loader)
    if not has_plain_batches(loader):
        return None
    length = geometry(loader)["length"]
    if type(sampler) in (DistributedSampler, ResumableSampler):
        if sampler.num_replicas != data_size:
            return None
        return {"kind": "distributed", "shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
    if _compat.distributed_over(sampler) is not None:
        return {"kind": "sampler"} if sampler.num_replicas == data_size and not sampler.shuffle else None
    if data_size > 1:
        return None
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is RandomSampler:
        return {
            "kind": "random",
            "replacement": sampler.replacement,
            "num_samples": sampler.num_samples if sampler.num_samples != length else None,
            "generator": _generator_of(sampler).get_state(),
        }
    return {"kind": "sampler"}


def keep_seed(loader: Any, order: State | None) -> None:
    """Let a distributed sampler go on with the seed of the run, whatever the process that resumes was seeded with."""
    sampler = sampler_of(loader)
    if order is not None and order["kind"] == "distributed" and isinstance(sampler, DistributedSampler):
        sampler.seed = order["seed"]


def _generator_of(sampler: RandomSampler) -> torch.Generator:
    """One in the state from which the sampler draws its order when it is asked now."""
    generator = torch.Generator()
    if sampler.generator is not None:
        generator.set_state(sampler.generator.get_state())
    else:
        # The sampler draws a seed for its generator from the default one.
        generator.set_state(torch.get_rng_state())
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        generator.manual_seed(seed)
    return generator


def rebuild_order(loader: Any, place: State) -> list[int]:
    """The order of the samples in which all data ranks together went through the pass that a place is in."""
    order, length = place["order"], place["geometry"]["length"]
    if order["kind"] == "distributed":
        return epoch_order(length, shuffle=order["shuffle"], seed=order["seed"], epoch=order["epoch"])
    if order["kind"] == "sequential":
        return list(range(length))
    if order["kind"] == "random":
        generator = torch.Generator()
        generator.set_state(order["generator"])
        return list(RandomSampler(range(length), order["replacement"], order["num_samples"], generator))
    inner = _compat.distributed_over(sampler_of(loader))
    with generators_at(loader, place["at_first"]):
        return list(sampler_of(loader) if inner is None else inner)


# -- generators and samplers with a state -----------------------------------------------------------------------------


def host_random_state() -> State:
    """The state of the default generators that samplers may draw from."""
    return {name: state for name, state in random_state().items() if name in ("python", "numpy", "torch")}


@contextmanager
def generators_at(loader: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Put the default generators into a former state for a while, and the loader's own ones for good."""
    before = host_random_state()
    set_random_state({**before, **{name: value for name, value in state.items() if name != "own"}})
    set_own_state(loader, state["own"])
    try:
        yield
    finally:
        set_random_state(before)


def _own(loader: Any) -> list[Any]:
    """What beside the default generators decides a loader's order: generators, and samplers with a state_dict."""
    found: list[Any] = []
    seen: set[int] = set()

    def look(value: Any) -> None:
        if value is None or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            found.append(value)
        elif isinstance(value, Sampler) or value is loader.sampler or value is loader.batch_sampler:
            if is_stateful(value) and not isinstance(value, ResumableSampler):
                found.append(value)
            for inner in list(vars(value).values()) if hasattr(value, "__dict__") else ():
                look(inner)
            look(_compat.distributed_over(value))

    for start in (loader.generator, loader.batch_sampler, loader.sampler):
        look(start)
    return found


def is_stateful(value: Any) -> bool:
    """Whether it saves its state itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def own_state(loader: Any) -> list[Any]:
    """The state of the loader's own generators and samplers, in plain types and tensors."""
    return [_state_of(value) for value in _own(loader)]


def set_own_state(loader: Any, states: list[Any]) -> None:
    """Restore what `own_state` returned; nothing, if the loader has others now, which a replay notices."""
    own = _own(loader)
    if len(own) == len(states):
        for value, state in zip(own, states, strict=True):
            _set_state_of(value, state)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return _arrays_to_tensors(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _arrays_to_tensors(value.get_state(legacy=False))
    return copy.deepcopy(value.state_dict())


def _set_state_of(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = _tensors_to_arrays(state)
    elif isinstance(value, np.random.RandomState):
        value.set_state(_tensors_to_arrays(state))
    else:
        value.load_state_dict(copy.deepcopy(state))


def _arrays_to_tensors(value: Any) -> Any:
    """Numpy's states hold arrays of unsigned numbers, which a checkpoint of plain types does not."""
    if isinstance(value, Mapping):
        return {key: _arrays_to_tensors(item) for key, item in value.items()}
    return torch.from_numpy(value.astype(np.int64)) if isinstance(value, np.ndarray) else value


def _tensors_to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tensors_to_arrays(item) for key, item in value.items()}
    return value.numpy().astype(np.uint32) if isinstance(value, torch.Tensor) else value
