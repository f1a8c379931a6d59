"""Random streams: which ranks draw the same numbers.

Ranks that share their samples keep the default generator of a device in step, so that what they all compute is dropped
alike. Where each has a part of a tensor, its features or its positions, it draws from a stream of its own. That stream
starts from a seed drawn from the default generator: it needs no state besides it, and activation checkpointing, which
brings back the default generator before it recomputes, replays it.
"""

from __future__ import annotations

from typing import NamedTuple

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
