"""The private APIs of torch and Lightning that the package uses: what breaks when one of them changes.

Each test names the API and does with it what the compat function does, so that a failure after an upgrade points to the
one function to mend.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from probe import Probe, numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par.checkpoint import _compat as checkpoint_compat
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel import _compat, _compat_fsdp
from lightning_par.parallel.data import _check_classes
from lightning_par.resilience import _compat as resilience_compat
from lightning_par.strategies import DataParallelStrategy, _compat_logging, _compat_signals
from lightning_par.strategies import _compat as lightning_compat
from lightning_par.strategies import _compat_steps as steps_compat
from lightning_par.testing import run_ranks
from parity import make_trainer


def test_engine_queue_callback_runs_once_at_the_end_of_backward() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        order.append("gradient")
        _compat.run_at_end_of_backward(lambda: order.append("end"))

    y = x * 2
    y.register_hook(hook)
    y.register_hook(lambda grad: order.append("another hook"))
    y.sum().backward()
    assert order == ["gradient", "another hook", "end"]


def fsdp_state() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(root[0])
    fully_shard(root)
    # Without the call torch refuses a submodule that runs before its root.
    _compat_fsdp.finalize_fsdp(root)
    root[0](torch.ones(1, 4))
    root(torch.ones(1, 4)).sum().backward()
    tensors = _compat_fsdp.fsdp_tensors(root)
    assert sum(t.numel() for t in tensors.sharded) == 40
    _compat_fsdp.reset_fsdp_iteration(root)
    assert all(p.grad is not None for p in root.parameters())


def test_fsdp_state_lazy_init_and_parameter_groups() -> None:
    run_ranks(2, fsdp_state)


T = TypeVar("T")


class Fields:
    __slots__ = ("field",)


class OnlyDict:
    __slots__ = ("__dict__",)


class Sized(Protocol):
    def size(self) -> int: ...


class SlottedSized(Protocol):
    __slots__ = ()

    def size(self) -> int: ...


class Countable(ABC):
    @abstractmethod
    def size(self) -> int: ...


class HasSize(nn.Linear):
    def size(self) -> int:
        return self.weight.numel()


class AbstractFirst(ABC, nn.Linear):
    pass


class AbstractLast(nn.Linear, ABC):
    pass


class Parametrised(Generic[T], nn.Linear):
    pass


class OfInts(Parametrised[int]):
    pass


class AbstractAndParametrised(ABC, Generic[T], nn.Linear):
    pass


class WithProtocol(Sized, HasSize):
    def size(self) -> int:
        return super(Sized, self).size()


class WithSlottedProtocol(SlottedSized, HasSize):
    def size(self) -> int:
        return super(SlottedSized, self).size()


class WithAbstractMethod(Countable, nn.Linear):
    def size(self) -> int:
        return self.weight.numel()


class Lightning(Countable, pl.LightningModule):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def size(self) -> int:
        return self.weight.numel()


class FieldsFirst(Fields, nn.Linear):
    pass


class FieldsLast(nn.Linear, Fields):
    pass


class OnlyDictFirst(OnlyDict, nn.Linear):
    pass


class Usual(nn.Linear):
    """No test before shares its FSDP class, whose `__deepcopy__` `refuse_copies` replaces, as that of `nn.Linear`."""


CLASSES: list[Any] = [
    Usual,
    AbstractFirst,
    AbstractLast,
    Parametrised,
    OfInts,
    AbstractAndParametrised,
    WithProtocol,
    WithSlottedProtocol,
    WithAbstractMethod,
    Lightning,
    FieldsFirst,
    FieldsLast,
    OnlyDictFirst,
]


def fsdp_classes(classes: list[Any]) -> list[str]:
    """Shard an instance of each class as torch does an `nn.Linear`, and return the names of the classes then."""
    names = []
    for cls in classes:
        module, other = cls(4, 4), cls(4, 4)
        if isinstance(module, Fields):
            module.field = "kept"
        for one in (module, other):
            _compat_fsdp.make_fsdp_class(one)
            assert type(one) is cls
            fully_shard(one)
        assert type(module) is type(other)
        assert isinstance(module, cls)
        assert isinstance(module, FSDPModule)
        assert type(module).__mro__[2] is cls  # where torch looks for the user's class
        module.double()  # FSDP2 has an `_apply` of its own
        module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        assert module.weight.grad.shape == (4, 4)
        module.reshard()
        assert list(module.state_dict()) == list(cls(4, 4).state_dict())
        with pytest.raises(AssertionError, match="deepcopy"):
            copy.deepcopy(module)
        with pytest.raises((pickle.PicklingError, AttributeError), match=f"FSDP{cls.__name__}"):
            pickle.dumps(module)
        assert type(pickle.loads(pickle.dumps(cls(4, 4)))) is cls
        assert type(type(module)(4, 4)) is cls  # torch: an FSDP class called makes a plain module
        assert not hasattr(module, "size") or module.size() == 16
        assert getattr(module, "field", "kept") == "kept"
        names.append(type(module).__name__)
    return names


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fsdp_class_of_every_kind_of_base(cls: Any) -> None:
    """torch alone fails with "__class__ assignment: 'FSDPAbstractFirst' object layout differs from 'AbstractFirst'"."""
    assert run_ranks(2, fsdp_classes, [cls]) == [[f"FSDP{cls.__name__}"]] * 2


def test_classes_that_torch_serves_are_left_to_it() -> None:
    for module in (nn.Module(), nn.Linear(1, 1), AbstractLast(1, 1)):
        _compat_fsdp.make_fsdp_class(module)
    assert not {nn.Module, AbstractLast} & set(get_cls_to_fsdp_cls())


class Final(ABC, nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final has no subclasses")


def test_a_class_that_fsdp_cannot_extend_is_refused_before_anything_is_sharded() -> None:
    module = Final(4, 4)
    with pytest.raises(ParallelConfigError, match=r"(?s)in front of `Final`: Final has no .*fix: .*par_ddp") as error:
        _check_classes([module])
    assert isinstance(error.value.__cause__, TypeError)
    assert type(module) is Final
    assert Final not in get_cls_to_fsdp_cls()


def mesh_views() -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = _compat.flatten_mesh(mesh, "ab")
    again = _compat.unflatten_mesh(flat, (2, 2), ("c", "d"))
    both = _compat.concatenate_meshes([mesh["a"], mesh["b"]])
    return [flat.mesh.flatten().tolist(), again.mesh.flatten().tolist(), both.mesh.flatten().tolist()]


def test_device_mesh_flatten_unflatten_concatenate() -> None:
    assert run_ranks(4, mesh_views)[0] == [[0, 1, 2, 3]] * 3


def test_foreach_kernels() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2,), -4.0)]
    assert torch.allclose(torch.stack(_compat.foreach_norm(tensors, 2.0)) ** 2, torch.tensor([12.0, 32.0]))
    _compat.foreach_mul_(tensors, torch.tensor(0.5))
    _compat.foreach_clamp_(tensors, 1.5)
    assert tensors[0].tolist() == [1.0] * 3
    assert tensors[1].tolist() == [-1.5] * 2
    found = torch.zeros(1)
    _compat.unscale_and_check_([torch.tensor([1.0, float("inf")])], found, torch.tensor(0.5))
    assert found.item() == 1


def test_storage_notes_follow_views() -> None:
    tensor = torch.empty(4, device="meta")
    _compat.set_storage_note(tensor, "note")
    assert _compat.storage_note(tensor[1:]) == "note"
    assert _compat.shares_storage(tensor, tensor.view(2, 2))
    assert not _compat.shares_storage(tensor, torch.empty(4, device="meta"))


def test_hook_tables_of_tensors_and_modules() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not _compat.has_gradient_hooks(x)
    x.register_post_accumulate_grad_hook(lambda p: None)
    assert _compat.has_gradient_hooks(x)
    block = nn.Sequential(nn.Linear(2, 2))
    assert not _compat.has_inner_forward_hooks(block)
    block[0].register_forward_hook(lambda *a: None)
    assert _compat.has_inner_forward_hooks(block)
    version = _compat.tensor_version(x)
    with torch.no_grad():
        x.add_(1)
    assert _compat.tensor_version(x) > version


def test_factory_functions_and_modes() -> None:
    assert torch.empty in _compat.factory_functions()
    with torch.device("meta"), _compat.no_function_modes():
        assert not torch.empty(1).is_meta


def test_fsdp_class_is_recognised() -> None:
    assert not isinstance(nn.Linear(1, 1), FSDPModule)


@pytest.mark.parametrize("status", list(TrainerStatus))
def test_trainer_status(status: TrainerStatus) -> None:
    trainer = SimpleNamespace(state=SimpleNamespace(status=status))
    assert lightning_compat.is_interrupted(trainer) == (status is TrainerStatus.INTERRUPTED)


def test_loops_have_an_inference_mode_switch() -> None:
    trainer: Any = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.validate_loop.inference_mode is True
    lightning_compat.evaluation_without_inference_mode(trainer)
    assert not any(loop.inference_mode for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop))


def test_worker_seeding_is_recognised() -> None:
    loader: DataLoader[Any] = DataLoader([1, 2])
    with mock.patch.dict(os.environ, PL_SEED_WORKERS="1"):
        assert lightning_compat.workers_are_seeded(loader)
        loader.worker_init_fn = lambda worker: None
        assert not lightning_compat.workers_are_seeded(loader)
    with mock.patch.dict(os.environ, PL_SEED_WORKERS="0"):
        loader.worker_init_fn = None
        assert not lightning_compat.workers_are_seeded(loader)


def store_and_gather() -> tuple[bytes, list[float]]:
    lightning_compat.default_store().set("key", "value")
    gathered = lightning_compat.all_gather(torch.tensor(float(dist.get_rank())), dist.group.WORLD, False)
    return lightning_compat.default_store().get("key"), gathered.tolist()


def test_default_store_and_all_gather() -> None:
    assert run_ranks(2, store_and_gather) == [(b"value", [0.0, 1.0])] * 2


def destroyed_and_made_again() -> None:
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=mesh)
        module(torch.ones(1, 4)).sum().backward()
        module.weight.grad.full_tensor()  # type: ignore[union-attr, operator]
        _compat.forget_meshes()


def test_dtensor_caches_are_emptied() -> None:
    run_ranks(2, destroyed_and_made_again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.bool])
def test_torch_save_builds_tensors_of_a_storage(dtype: torch.dtype) -> None:
    """`Tensor.__reduce_ex__` and `TypedStorage`: `convert` writes the same calls and classes for tensors it has not."""
    rebuild, kind, rest = checkpoint_compat.rebuilding(dtype)
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    its_rebuild, (storage, _, _, _, *its_rest) = tensor.__reduce_ex__(2)
    its_kind, data, length = checkpoint_compat.storage_parts(storage) or (None, None, 0)
    assert (rebuild, kind, rest) == (its_rebuild, its_kind, tuple(its_rest))
    assert isinstance(data, torch.UntypedStorage)
    assert length == (data.nbytes() if kind is torch.UntypedStorage else 3)
    assert checkpoint_compat.bytes_of(data) == checkpoint_compat.bytes_of(tensor)


class Doubled(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [batch * 2 for batch in lightning_compat.index_sampler(self)]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_take_their_indices_from_a_property(workers: int) -> None:
    options: Any = {"batch_size": 2, "num_workers": workers, "persistent_workers": workers > 0}
    loader = Doubled(range(4), **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 0, 1], [2, 3, 2, 3]]
    assert lightning_compat.has_workers(loader) == (workers > 0)
    plain = DataLoader(range(4), **options)
    assert len(list(plain)) == 2
    # Workers that persist were started with the indices of the plain one.
    view = object.__new__(Doubled)
    view.__dict__ = plain.__dict__
    lightning_compat.use_index_sampler_of(view)
    assert [batch.tolist() for batch in view] == [[0, 1, 0, 1], [2, 3, 2, 3]]


def test_the_sampler_within_a_distributed_one_of_lightning() -> None:
    inner = [3, 1, 2]
    sampler = DistributedSamplerWrapper(inner, num_replicas=2, rank=1, shuffle=False)
    assert lightning_compat.distributed_over(sampler) is inner
    assert lightning_compat.distributed_over(inner) is None
    loader = DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 1))
    lightning_compat.set_sampler_epoch(loader, 5)
    assert loader.sampler.epoch == 5


class Looked(pl.Callback):
    """Looks at the loops of a fit where a resume does."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (loader,) = lightning_compat.training_loaders(trainer)
        assert len(loader) == 2
        assert lightning_compat.training_loaders_cycle(trainer)
        assert len(lightning_compat.validation_loaders(trainer)) == 1
        assert lightning_compat.reload_epochs(trainer) == [0, 0]
        assert lightning_compat.fit_progress(trainer)["epoch_loop.batch_progress"]["current"]["ready"] == 0
        lightning_compat.set_batch_in_epoch(trainer, 1)
        assert lightning_compat.steps_after_batch(trainer) == (True, False)
        lightning_compat.set_batch_in_epoch(trainer, 2)
        assert lightning_compat.steps_after_batch(trainer) == (True, True)
        lightning_compat.set_batch_in_epoch(trainer, 0)
        lightning_compat.count_logged_steps(trainer, 7)
        lightning_compat.go_on_with_monitors(trainer, {"loss": torch.ones(())})

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen[f"step {trainer.global_step}"] = lightning_compat.logged_step(trainer)
        if trainer.global_step == 1:
            lightning_compat.end_epoch_without_batch(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen["monitored"] = lightning_compat.monitored_values(trainer)
        lightning_compat.set_reload_epochs(trainer, [3, 4])
        self.seen["reloaded"] = lightning_compat.reload_epochs(trainer)


def test_loops_of_a_fit_can_be_put_right() -> None:
    looked = Looked()
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[looked], enable_model_summary=False, **options)
    data = DataLoader(torch.ones(4, 32), batch_size=2)
    trainer.fit(BoringModel(), data, data)
    assert looked.seen["step 1"] == 7
    assert "step 2" not in looked.seen
    assert looked.seen["monitored"]["loss"] == 1
    assert looked.seen["reloaded"] == [3, 4]
    for begin in (lightning_compat.begin_epoch_afresh, lightning_compat.begin_batches_afresh):
        trainer.fit_loop.load_state_dict(trainer.fit_loop.state_dict())
        trainer.fit_loop.epoch_loop.restarting = True
        begin(trainer)
        assert not trainer.fit_loop.epoch_loop.restarting


def waits_seen() -> list[str]:
    original, seen = dist.Work.wait, []
    undo = resilience_compat.around_waits(lambda: seen.append("before"), lambda token: seen.append("after"))
    dist.all_reduce(torch.ones(1))
    undo()
    dist.all_reduce(torch.ones(1))
    assert dist.Work.wait is original
    return seen


def test_work_wait_is_where_collectives_wait() -> None:
    assert run_ranks(1, waits_seen) == [["before", "after"]]


def test_the_training_loop_says_when_it_fetches_and_bars_show_what_they_are_given() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    fetched: list[int] = []
    undo = lightning_compat.before_fetch(trainer, lambda: fetched.append(trainer.global_step))
    trainer.fit(BoringModel())
    undo()
    assert fetched[:3] == [0, 1, 2]
    lightning_compat.show_in_progress_bar(trainer, {"tokens/s": 3.0})
    assert trainer.progress_bar_metrics["tokens/s"] == 3.0
    assert "_on_before_fetch" not in vars(trainer.fit_loop.epoch_loop)


def own_store_and_flight_recorder() -> tuple[bool, list[dict[str, Any]]]:
    store = resilience_compat.own_connection()
    assert store is not None
    shared = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("of resilience", "told")
    dist.barrier()
    value = store.get("of resilience")
    group = dist.new_group([0, 1], backend="gloo", group_desc="ours")
    dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() == 0:
        # No peer comes: it is called and not over.
        dist.broadcast(torch.ones(2, 2), 0, group=group, async_op=True)
    # Of the first call, which another thread notes as over.
    found: list[dict[str, Any]] = []
    while not found or not found[0]["over"]:
        found = [g for g in resilience_compat.collectives(resilience_compat.flight_records()) if g["about"] == "ours"]
    return value == b"told" and store is not shared, found


def test_the_store_gives_a_second_connection_and_the_flight_recorder_tells_what_is_not_over() -> None:
    (own_0, of_0), (own_1, of_1) = run_ranks(2, own_store_and_flight_recorder)
    assert own_0
    assert own_1
    assert (of_1[0]["ranks"], of_1[0]["called"], of_1[0]["over"]) == ([0, 1], 1, 1)
    assert of_0[0]["calls"] == {"1": "all_reduce [3] Float", "2": "broadcast [2, 2] Float"}
    assert of_0[0]["name"] == of_1[0]["name"]
    assert of_0[0]["called"] == 2


def test_without_a_flight_recorder_nothing_is_told() -> None:
    module = torch._C._distributed_c10d
    names = [name for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(module, name)]
    with contextlib.ExitStack() as without:
        for name in names:
            without.enter_context(mock.patch.object(module, name, None))
        assert resilience_compat.flight_records() == []
    assert resilience_compat.collectives([]) == []
    assert resilience_compat.collectives(['{"version": "0"}']) == []


def test_lightnings_signal_handlers_can_be_left_out() -> None:
    """`_SignalConnector.register_signal_handlers` is what installs them, and its teardown then does nothing.

    `_TrainingEpochLoop._broadcast_sigterm_tensor` is called before each batch.
    """
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[SLURMEnvironment()])
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    loop = trainer.fit_loop.epoch_loop
    assert callable(loop._broadcast_sigterm_tensor)
    undo = _compat_signals.without_signal_handlers(trainer)
    assert "_broadcast_sigterm_tensor" in vars(loop)
    trainer._signal_connector.register_signal_handlers()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    trainer._signal_connector.teardown()
    for _ in range(2):
        undo()
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    trainer._signal_connector.register_signal_handlers()
    assert signal.getsignal(signal.SIGTERM) != before[0]
    assert signal.getsignal(signal.SIGUSR1) != before[1]
    trainer._signal_connector.teardown()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


class Losing(Probe):
    """Before its first batch a collective finds that another rank is gone; or rank 1 is told to end."""

    def __init__(self, what: str, patches: contextlib.ExitStack) -> None:
        super().__init__()
        self.what, self.patches = what, patches

    def on_train_epoch_start(self) -> None:
        if self.what == "lost":
            self.patches.enter_context(mock.patch.object(dist, "all_reduce", side_effect=OSError("lost")))
        elif dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def ends_in_a_batch(what: str) -> tuple[str, int, bool]:
    trainer, told = make_trainer(2, DataParallelStrategy(), max_steps=5), "nothing"
    with contextlib.ExitStack() as patches:
        try:
            trainer.fit(Losing(what, patches), numbers(20))
        except (OSError, SIGTERMException) as error:
            told = type(error).__name__
    return told, trainer.global_step, "_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize(("what", "error"), [("lost", "OSError"), ("told", "SIGTERMException")])
def test_what_comes_before_each_batch_hides_no_rank_that_is_gone(what: str, error: str) -> None:
    """`_TrainingEpochLoop._broadcast_sigterm_tensor` takes any error for no signal; `_sigterm_notifier_fn` waits."""
    assert run_ranks(2, ends_in_a_batch, what) == [(error, 0, False)] * 2


def short_trainer() -> pl.Trainer:
    """One batch, quietly."""
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=0,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_names_are_compared_before_anything_is_reduced() -> None:
    """`epoch_end_reached` and `on_epoch_end` of `_LoggerConnector` come before reductions at the end of an epoch."""
    order: list[str] = []

    class Module(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0, sync_dist=True, on_step=False, on_epoch=True)
            self.log("mine", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            order.append("hook")
            self.log("b", 1.0, sync_dist=True)

    trainer = short_trainer()
    undo = _compat_logging.before_reducing_logged(trainer, lambda names: order.append(" ".join(names)))

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("reduce")
        return tensor

    with (
        mock.patch.object(trainer.strategy, "reduce", reduce),
        mock.patch.object(type(trainer._accelerator_connector), "is_distributed", True),
    ):
        trainer.fit(Module())
    undo()
    assert order.index("a") < order.index("hook") < order.index("a b")
    # Before, Lightning sums up the lengths of loaders.
    assert "reduce" not in order[order.index("a") : order.index("a b")]
    assert "reduce" in order[order.index("a b") :]
    assert not {"epoch_end_reached", "on_epoch_end"} & trainer._logger_connector.__dict__.keys()


def test_a_reduction_that_fails_names_its_metric() -> None:
    """`_ResultMetric.update` reduces what is logged in a step."""

    class Module(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with mock.patch.object(trainer.strategy, "reduce", side_effect=RuntimeError("Timed out")):
                self.log("rare", 1.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    trainer = short_trainer()
    undo = _compat_logging.name_metric_that_fails()
    with (
        mock.patch.object(type(trainer._accelerator_connector), "is_distributed", True),
        pytest.raises(RuntimeError, match="Timed out") as error,
    ):
        trainer.fit(Module())
    undo()
    assert "training_step logs as 'rare'" in error.value.__notes__[0]


class GoesBack(pl.Callback):
    """Notes the counts after the first batch, and goes back to them after the third."""

    def __init__(self) -> None:
        self.counts: list[Any] = []
        self.batches: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)
        if len(self.batches) == 1:
            self.counts.append(copy.deepcopy(steps_compat.step_counts(trainer)))
        if len(self.batches) == 3:
            assert trainer.global_step == 3
            saved = lightning_compat.dump_checkpoint(trainer)
            assert steps_compat.saved_step_counts(saved) == steps_compat.step_counts(trainer)
            steps_compat.set_step_counts(trainer, self.counts[0])
            assert steps_compat.step_counts(trainer) == self.counts[0]
            assert trainer.global_step == 1
            steps_compat.go_back_to_batch(trainer, 1)


def test_a_fit_can_go_back_within_an_epoch() -> None:
    callback = GoesBack()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, **quiet)
    # The loader begins anew, and the loop takes as many batches as are left of the epoch.
    trainer.fit(BoringModel(), DataLoader(torch.randn(5, 32)))
    assert callback.batches == [0, 1, 2, 1, 2, 3, 4]
    assert trainer.global_step == 5
    assert callback.counts[0]["logged"] == 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_read_a_veto(kind: Any) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(params, lr=0.1, fused=True)
    if kind is torch.optim.Adagrad and torch.__version__.startswith("2.11"):
        pytest.skip("it reads none there, and is refused")
    assert steps_compat.takes_out_scale(optimizer)
    assert not steps_compat.takes_out_scale(kind(params, lr=0.1))
    for veto in (0.0, 1.0, None):
        before = copy.deepcopy((params, optimizer.state_dict()["state"]))
        for param in params:
            param.grad = torch.full_like(param, float("nan") if veto else 1.0)
        steps_compat.leave_step_to(optimizer, None if veto is None else torch.tensor(veto))
        optimizer.step()
        for new, old in zip(params, before[0], strict=True):
            assert torch.equal(new, old) == bool(veto)
        for index, state in before[1].items():
            assert all(
                torch.equal(optimizer.state_dict()["state"][index][n], v) == bool(veto)
                for n, v in state.items()
                if n == "step"
            )
    assert not hasattr(optimizer, "found_inf")


def test_hooks_of_steps_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    assert not steps_compat.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert steps_compat.has_step_hooks(optimizer)
    handle.remove()
    optimizer.register_step_post_hook(lambda *_: None)
    assert steps_compat.has_step_hooks(optimizer)
