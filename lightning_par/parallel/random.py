"""The states of the default random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
