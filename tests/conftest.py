"""Isolation: no test sees what another one left in its process."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_par.parallel._compat import forget_meshes

os.environ["OMP_NUM_THREADS"] = "1"
# Verified plans are kept for one run of the tests, also between the processes that it starts.
_CACHE = tempfile.TemporaryDirectory()
os.environ["LIGHTNING_PAR_CACHE"] = _CACHE.name
torch.set_num_threads(1)
# Process groups that tests destroyed wait for the collector in the meshes of their trainers. If one comes to it in a
# forked worker of a loader, gloo joins threads that are not there, and the worker dies.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    """Give back the environment, the process group and torch's global settings after each test."""
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def nothing_from_before() -> Iterator[None]:
    """Leave out the million objects that other tests and imports have left: counts of live tensors walk over them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def quiet_lightning() -> None:
    """Lightning tells at each Trainer which accelerators there are."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
