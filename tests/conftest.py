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


def _collect_nothing_of_the_parent() -> None:
    gc.freeze()
    gc.enable()


# A forked worker of a loader that collects a process group, which a test has left in a cycle, dies: gloo joins threads
# that are not in the child. Disabled before, as the hooks of Python that come first there may start a collection.
os.register_at_fork(before=gc.disable, after_in_parent=gc.enable, after_in_child=_collect_nothing_of_the_parent)


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
        gc.collect()  # trainers and meshes hold groups in cycles, and each group has threads
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def pytest_collection_finish() -> None:
    """Leave out a million objects of imports and collected tests: with them each collection takes half a second."""
    forget_meshes()  # its next calls do not see the caches among them any more
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_from_before() -> None:
    """Leave out what other tests have left: counts of live tensors walk over all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quiet_lightning() -> None:
    """Lightning tells at each Trainer which accelerators there are."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
