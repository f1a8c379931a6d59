"""Random streams: which ranks draw the same numbers.

Ranks that share their samples keep the default generator of a device in step, so that what they all compute is dropped
alike. Where each has a part of a tensor, its features or its positions, it draws from a stream of its own. That stream
starts from a seed drawn from the default generator: it needs no state besides it, and activation checkpointing, which
brings back the default generator before it recomputes, replays it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_par.parallel._compat import no_torch_modes

_SEEDS = 2**62
# The golden ratio in 64 bits (Steele et al. 2014, "Fast splittable pseudorandom number generators"): multiples of it
# differ in their lower half too, which is all that the CPU's generator takes of a seed.
_STRIDE = 0x9E3779B97F4A7C15
# Philox makes four numbers at once, and offsets count single ones.
_OFFSET_STEP = 4


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators on a device draw from, or None where nothing is computed (meta)."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator if device.type == "cpu" else None
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator


class Stream(NamedTuple):
    """What a default generator draws from for a while.

    Attributes:
        generator: The default generator.
        seed: What it was seeded with.
        before: Its state before that.
    """

    generator: torch.Generator
    seed: int
    before: Tensor

    @property
    def is_running(self) -> bool:
        """Whether the generator draws from this stream: a recomputation that stops early leaves it without an end."""
        return self.generator.initial_seed() == self.seed

    def end(self) -> None:
        """Go on with what was before."""
        with no_torch_modes():
            self.generator.set_state(self.before)


def begin_own_stream(device: torch.device, rank: int) -> Stream | None:
    """Let the default generator of a device draw other numbers on each rank, until the stream is ended.

    Then it is where it was, with one seed drawn; the same on ranks where it was the same.

    Args:
        device: Where random numbers are drawn.
        rank: The rank among those that must differ.
    """
    generator = default_generator(device)
    if generator is None:
        return None
    with no_torch_modes():
        seed = _draw_seed(generator)
    return _begin(generator, seed + rank)


def begin_shared_stream(device: torch.device, rank: int, number: int) -> Stream | None:
    """Inside an own stream, let all ranks draw the same numbers, until the stream is ended.

    Args:
        device: Where random numbers are drawn.
        rank: What the own stream was begun with.
        number: Distinguishes shared streams inside one own stream.
    """
    generator = default_generator(device)
    if generator is None:
        return None
    # The generator itself tells the seed, also when a recomputation has brought back its state and nothing else.
    common = generator.initial_seed() - rank
    return _begin(generator, (common + (number + 1) * _STRIDE) % _SEEDS)


def begin_stream(device: torch.device, seed: int) -> Stream | None:
    """Let the default generator of a device start from a seed, until the stream is ended."""
    generator = default_generator(device)
    return None if generator is None else _begin(generator, seed % _SEEDS)


def _begin(generator: torch.Generator, seed: int) -> Stream:
    with no_torch_modes():
        before = generator.get_state()
        generator.manual_seed(seed)
    return Stream(generator, seed, before)


def _draw_seed(generator: torch.Generator) -> int:
    if generator.device.type == "cpu":
        return int(torch.randint(_SEEDS, (), generator=generator).item())
    # Without waiting for the device: its generator is a seed and the count of numbers drawn, both known here.
    offset = generator.get_offset()
    generator.set_offset(offset + _OFFSET_STEP)
    return hash((generator.initial_seed(), offset)) % _SEEDS


def random_state() -> dict[str, Any]:
    """Return the state of this process's default generators, made of plain types and tensors."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; the state of an accelerator that is not here is left out."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Let the default generators go on afterwards as if nothing had been drawn inside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
