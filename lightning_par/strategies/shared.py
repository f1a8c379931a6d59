"""What the Trainer shell and the Fabric shell have in common: options, processes, the mesh, data ranks, collectives."""

from __future__ import annotations

import atexit
import difflib
import functools
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DataLoader

from lightning_par.checkpoint import CheckpointSaver, is_sharded_checkpoint, remove_checkpoint
from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.layout import ParallelLayout, ParallelMesh
from lightning_par.parallel import apply
from lightning_par.parallel.memory import ActivationCheckpointing
from lightning_par.parallel.options import ParallelOptions
from lightning_par.parallel.precision import MixedPrecision, PrecisionPolicy, resolve_precision
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.parallel.report import explain
from lightning_par.parallel.shards import full_tensor
from lightning_par.resilience.control import StepControl
from lightning_par.strategies import _compat, foreign
from lightning_par.strategies.loaders import DataRanks
from lightning_par.strategies.replay import OnLostPlace
from lightning_par.strategies.torchrun import group_of_this_start

if TYPE_CHECKING:
    from lightning_par.parallel.tensor import Example

log = logging.getLogger(__name__)
_LAST_BREATH = 0.1  # seconds

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

StateDictType = Literal["sharded", "full"]


def explain_unknown_options(init: F) -> F:
    """Turn the TypeError of an unknown keyword of `init` into a `ParallelConfigError` with near misses."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        problems = Problems()
        for name in sorted(kwargs.keys() - set(known)):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            problems.add(
                f"{type(self).__name__} has no option {name!r}; its options are {', '.join(known)}",
                f"{near[0]}={kwargs[name]!r}" if near else f"leave out {name}",
            )
        problems.raise_if_any()
        init(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


class MeshShell:
    """Mixin under both `MeshStrategy` classes; the host class supplies Lightning's own properties.

    The sizes multiply to the number of processes; one of them may be -1 for "whatever is left".

    Args:
        pp_size: Ranks of a pipeline, each with its own blocks of the model; they see the same samples.
        dp_replicate_size: Replicas that each hold all shards (HSDP), or all parameters with ``dp_shard_size=1`` (DDP).
        dp_shard_size: Ranks over which parameters, gradients and optimizer state are sharded; 1 replicates them.
        ep_size: Ranks over which experts are spread. Planned; 1 for now.
        cp_size: Ranks that share a sequence. Planned; 1 for now.
        tp_size: Ranks that share each matrix (tensor parallelism); they see the same samples.
        zero_stage: What is sharded: 1 optimizer state, 2 and gradients, 3 and parameters.
        blocks: The repeated blocks of the model: ``"auto"``, or classes, class names or globs of module names.
        auto_wrap_policy: Lightning's word for ``blocks``, for classes.
        reshard_after_forward: Free gathered parameters between forward and backward; by default with ZeRO-3 only. An
            int is the number of ranks to re-shard over.
        mixed_precision: Dtypes that differ from what ``precision=`` of the Trainer says.
        autocast: Whether ``bf16-mixed`` runs the step under autocast, as Lightning's own plugin does.
        activation_checkpointing: ``"full"``, ``"selective"``, every n-th block (an int), or a function of name and
            block.
        compile: Compile each block; a string names the backend.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        sync_every_batch: Reduce gradients in each accumulation step; ``"auto"``: with ZeRO-2, ZeRO-3 and HSDP.
        tp_plan: How Linears are divided over the tp ranks: ``"auto"``, or by globs of module names ``"shard"``,
            ``"gather"`` or ``"replicate"`` (or the words of Hugging Face's plans), or a function of the model that
            returns such.
        sequence_parallel: Cut the sequence over the tp ranks inside the blocks, so that norms and what is saved for
            backward between the Linears are divided too.
        loss_parallel: ``"auto"`` leaves logits divided over the vocabulary where the step computes its loss with
            ``F.cross_entropy``; ``False`` gathers them.
        pp_schedule: Schedule of the pipeline: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"LoopedBFS"``,
            ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"`` or ``"DualPipeV"``.
        pp_microbatches: Micro-batches into which a batch is cut; by default two for each rank of the pipeline.
        pp_stages_per_rank: Stages of each rank; by default 1, or 2 with a schedule that interleaves.
        pp_split: ``"auto"`` balances work and memory; or the number of blocks of each stage, or the names of the first
            block of each stage but the first.
        pp_loss_weight: How losses of micro-batches make that of the batch: ``"auto"`` by counting the targets of
            cross entropies, ``"samples"``, or ``"sum"`` for steps that return sums.
        pp_broadcast_predictions: Whether all stages get what ``predict_step`` returns, or the last one only.
        verify: ``"always"`` compares a divided block with the undivided one at each start; ``"auto"`` trusts what was
            verified before with the same code.
        example_inputs: Arguments of the model's forward with which a tensor-parallel plan is proven, where the Trainer
            has no data to take them from: a tuple, a mapping or one tensor.
        state_dict_type: Checkpoints as a ``"sharded"`` directory or one ``"full"`` file that plain Lightning loads.
        async_save: Write sharded checkpoints while training goes on; it waits only until they are copied.
        on_lost_place: What a resume within an epoch does where a loader cannot find its place again on other ranks:
            ``"error"``, or ``"restart_epoch"``.
        process_group_backend: Backend of the process group; by default gloo on CPU, NCCL with gloo on GPU.
        timeout: How long a collective may take.

    Raises:
        ParallelConfigError: Before any process group is made, with everything that is wrong and how to fix it.
    """

    # Supplied by Lightning's ParallelStrategy in both hosts.
    cluster_environment: Any
    parallel_devices: list[torch.device] | None
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    accelerator: Any
    _launcher: Any
    # The host's launcher of subprocesses.
    _launcher_class: Callable[[Any, int, int], _Launcher]

    @explain_unknown_options
    def __init__(
        self,
        pp_size: int = 1,
        dp_replicate_size: int = 1,
        dp_shard_size: int = -1,
        ep_size: int = 1,
        cp_size: int = 1,
        tp_size: int = 1,
        *,
        zero_stage: int = 3,
        blocks: str | type[nn.Module] | list[str | type[nn.Module]] = "auto",
        auto_wrap_policy: type[nn.Module] | list[type[nn.Module]] | set[type[nn.Module]] | None = None,
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecision | None = None,
        autocast: bool = True,
        activation_checkpointing: bool
        | int
        | str
        | ActivationCheckpointing
        | Callable[[str, nn.Module], bool]
        | None = None,
        compile: bool | str = False,
        cpu_offload: bool = False,
        sync_every_batch: bool | Literal["auto"] = "auto",
        tp_plan: Literal["auto"] | dict[str, str] | Callable[[nn.Module], dict[str, str]] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: Literal["auto", False] = "auto",
        pp_schedule: str = "1F1B",
        pp_microbatches: int | None = None,
        pp_stages_per_rank: int | None = None,
        pp_split: Literal["auto"] | list[int] | list[str] = "auto",
        pp_loss_weight: Literal["auto", "samples", "sum"] = "auto",
        pp_broadcast_predictions: bool = True,
        verify: Literal["auto", "always"] = "auto",
        example_inputs: Any = None,
        state_dict_type: StateDictType = "sharded",
        async_save: bool = False,
        on_lost_place: OnLostPlace = "error",
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__()
        foreign.introduce(type(self))
        self._layout = ParallelLayout(pp_size, dp_replicate_size, dp_shard_size, ep_size, cp_size, tp_size)
        self._options = ParallelOptions(
            zero_stage=zero_stage,
            blocks=_merge_blocks(blocks, auto_wrap_policy),
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            cpu_offload=cpu_offload,
            sync_every_batch=sync_every_batch,
            tp_plan=tp_plan,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            pp_schedule=pp_schedule,
            pp_microbatches=pp_microbatches,
            pp_stages_per_rank=pp_stages_per_rank,
            pp_split=pp_split,
            pp_loss_weight=pp_loss_weight,
            verify=verify,
        )
        self._broadcast_predictions = pp_broadcast_predictions
        self._example_inputs = example_inputs
        self._mixed_precision = mixed_precision
        self._autocast = autocast
        self._state_dict_type = state_dict_type
        self._async_save = async_save
        self._saver = CheckpointSaver()
        self._control: StepControl | None = None
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._num_nodes = 1
        self._mesh: ParallelMesh | None = None
        self._precision_name = "32-true"
        self._handles: list[apply.Parallelized] = []
        # What a resume does with a loader that cannot find its place in the epoch again on these ranks.
        self.on_lost_place = on_lost_place
        self._init_host()

    def _init_host(self) -> None:
        """Set what only one of the hosts has."""

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> ParallelLayout:
        """The layout; sizes of -1 are filled in once the processes have met."""
        return self._mesh.layout if self._mesh is not None else self._layout

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh and its views.

        Raises:
            RuntimeError: Before the processes have met (`setup_environment`).
        """
        if self._mesh is None:
            raise RuntimeError("there is no device mesh before the processes have met (Trainer.fit, Fabric.launch)")
        return self._mesh

    @property
    def policy(self) -> PrecisionPolicy:
        """Dtypes of storage, computation and reduction, from the host's `precision=` and this strategy's options."""
        return resolve_precision(self._precision_name, self._mixed_precision, self._autocast)

    @property
    def state_dict_type(self) -> StateDictType:
        """Whether checkpoints are ``"sharded"`` directories or ``"full"`` files."""
        return self._state_dict_type

    @property
    def saver(self) -> CheckpointSaver:
        """Saves the sharded checkpoints; ``saver.wait()``, on all ranks, waits for one that is under way."""
        return self._saver

    @property
    def control(self) -> StepControl:
        """The collective of each optimizer step in which callbacks tell all ranks what one of them knows."""
        if self._control is None:
            self._control = StepControl(timeout=self._timeout)
        return self._control

    def _close_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    # -- processes -----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # A single process needs no launcher, so that notebooks with one device work.
        if not self.cluster_environment.creates_processes_externally and self.num_processes * self._num_nodes > 1:
            self._launcher = self._launcher_class(self.cluster_environment, self.num_processes, self._num_nodes)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self._num_nodes * self.num_processes)
        # Some environments ignore the setter, so the getter is asked.
        _compat.set_rank(self.global_rank)

    def _requested_layout(self) -> ParallelLayout:
        """The layout as the user asked for it; presets that depend on the ranks of a node override this."""
        return self._layout

    def _check(self) -> None:
        """Raise one `ParallelConfigError` with everything that is wrong; needs no process group."""
        layout = self._requested_layout()
        problems = Problems()
        problems.extend(layout.problems(self.world_size))
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (self.global_rank, self.world_size):
            problems.add(
                f"the process group that exists already has {dist.get_world_size()} ranks, of which this is "
                f"{dist.get_rank()}; devices x num_nodes make {self.world_size}, of which this would be "
                f"{self.global_rank}",
                f"devices={dist.get_world_size()}",
            )
        try:
            policy = self.policy
        except ParallelConfigError as error:
            problems.extend(error.problems)
            policy = resolve_precision("32-true")
        problems.extend(self._options.problems(layout, policy))
        problems.extend(self._connection_problems())
        if self._state_dict_type not in ("sharded", "full"):
            problems.add(
                f"state_dict_type is {self._state_dict_type!r}; it is 'sharded' or 'full'", "state_dict_type='sharded'"
            )
        if self.on_lost_place not in ("error", "restart_epoch"):
            problems.add(
                f"on_lost_place is {self.on_lost_place!r}; it is 'error' or 'restart_epoch'", "on_lost_place='error'"
            )
        problems.raise_if_any()

    def _connection_problems(self) -> list[Problem]:
        problems = Problems()
        if not isinstance(self._timeout, timedelta):
            problems.add(
                f"timeout is {self._timeout!r}; it is a timedelta",
                f"timeout=timedelta(seconds={self._timeout})"
                if isinstance(self._timeout, int | float)
                else "timeout=timedelta(minutes=30)",
                'timeout: "0:30:00"',
            )
        if "nccl" in (self._process_group_backend or "") and self.root_device.type == "cpu":
            problems.add(
                f"process_group_backend is {self._process_group_backend!r} and accelerator is 'cpu'; NCCL is for GPUs",
                "process_group_backend='gloo'",
            )
        return list(problems)

    def _connect(self) -> None:
        """Join or adopt the process group, and build the mesh."""
        reset_seed()
        if not dist.is_initialized():
            on_gpu = self.root_device.type == "cuda"
            # Control messages, metrics on the CPU and offloaded state need a CPU backend beside NCCL.
            self._process_group_backend = self._process_group_backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            _init_dist_connection(
                self.cluster_environment,
                self._process_group_backend,
                timeout=self._timeout,
                device_id=self.root_device if on_gpu else None,
                **group_of_this_start(self._timeout),
            )
            # Not at teardown: a sharded model is used after `fit`. Left alone, gloo aborts the interpreter's exit.
            atexit.register(_destroy_process_group)
        self._mesh = _shared_mesh(self._requested_layout().resolve(self.world_size), self.root_device.type)

    def _parallelize(
        self, module: nn.Module, forward_methods: Collection[str], example: Example | None = None
    ) -> apply.Parallelized:
        handle = apply.parallelize(
            module,
            self._requested_layout(),
            self.policy,
            self._options,
            mesh=self.mesh,
            device=self.root_device,
            forward_methods=forward_methods,
            example_inputs=example if self._example_inputs is None else self._example_inputs,
        )
        self._share_random_state()
        # Both shells call `begin_backward` before every backward.
        if handle.data.units is not None:
            handle.data.units.announced = True
        return handle

    def _share_random_state(self) -> None:
        """Let the default generators of the ranks that see the same samples go on alike, from the first one's state."""
        group = self.mesh.group("model")
        if group.size() > 1:
            state = [random_state()]
            dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
            set_random_state(state[0])

    def _same_loss(self, optimizer: Any, loss: Any) -> Any:
        """The loss by which an optimizer decides, the same on all ranks, so that they decide alike."""
        if not isinstance(optimizer, torch.optim.LBFGS) or not isinstance(loss, Tensor):
            return loss
        return self.reduce(loss.detach().clone())

    def explain(
        self,
        module: nn.Module,
        world_size: int,
        example: Example | None = None,
        svg: str | os.PathLike[str] | None = None,
    ) -> str:
        """Say what this strategy would do to a module on that many processes; needs no process group.

        Args:
            module: The module.
            world_size: Number of processes.
            example: A way to run it, taken if the strategy was given no `example_inputs`.
            svg: A file for a picture of the pipeline's schedule.
        """
        inputs = example if self._example_inputs is None else self._example_inputs
        return explain(module, self._requested_layout(), self.policy, self._options, world_size, inputs, svg)

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data ranks see disjoint samples; ranks of one model group see the same."""
        return {"num_replicas": DataRanks(self.mesh.data_size), "rank": self.mesh.data_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed loader workers by data rank, so that the ranks of one model group augment alike."""
        if isinstance(dataloader, DataLoader) and _compat.workers_are_seeded(dataloader):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.mesh.data_rank)
        return dataloader

    # -- collectives ---------------------------------------------------------------------------------------------

    def _before_collective(self) -> None:
        """Raise where the other ranks will not come."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not dist.is_initialized():
            return
        self._before_collective()
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Send any picklable object from one rank to all."""
        if not dist.is_initialized():
            return obj
        self._before_collective()
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks, once: ranks of one model group hold the same value.

        Args:
            tensor: A tensor, reduced in place where its dtype allows; anything else is returned as it is.
            group: Another group than the data ranks.
            reduce_op: "mean", "avg", "sum", "max", "min" or a `ReduceOp`. The mean of integers is a float.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        self._before_collective()
        if group is None:
            for handle in self._handles:
                handle.data.before_reduce_of_user()
        group = group or self.mesh.group("data")
        tensor = full_tensor(tensor)
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = name in ("mean", "avg") or name == dist.ReduceOp.AVG
        if mean and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        tensor = tensor.contiguous()
        op = getattr(dist.ReduceOp, "SUM" if mean else name.upper()) if mean or isinstance(name, str) else name
        dist.all_reduce(tensor, op, group=group)
        return tensor.div_(group.size()) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over all ranks of all axes: everybody's (`all`) or anybody's."""
        if not dist.is_initialized():
            return decision
        self._before_collective()
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote.item())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of the same shape from all data ranks, stacked on a new first dimension."""
        self._before_collective()
        return _compat.all_gather(full_tensor(tensor), group or self.mesh.group("data"), sync_grads)


def _merge_blocks(blocks: Any, auto_wrap_policy: Any) -> Any:
    """`auto_wrap_policy` is Lightning's word for `blocks`."""
    if auto_wrap_policy is None:
        return blocks
    problems = Problems()
    if blocks != "auto":
        problems.add("both blocks and auto_wrap_policy are given; they mean the same", "auto_wrap_policy=None")
    if callable(auto_wrap_policy) and not isinstance(auto_wrap_policy, type):
        problems.add(
            "auto_wrap_policy is a function; FSDP2 has no such policies, it takes the classes of the blocks",
            "auto_wrap_policy=[MyBlock]",
        )
    problems.raise_if_any()
    return list(auto_wrap_policy) if isinstance(auto_wrap_policy, set | frozenset) else auto_wrap_policy


def make_way(path: str | os.PathLike[str]) -> None:
    """Remove what a file is not written over: a link, since its target would be, and a checkpoint directory."""
    if os.path.islink(path) or is_sharded_checkpoint(path):
        remove_checkpoint(path)


def meet(key: str, timeout: timedelta) -> bool:
    """Wait for all ranks without a collective: True on every rank if all came in time, else False on every rank."""
    store = _compat.default_store()

    def decide(verdict: str) -> None:
        # Only the first decision counts: nobody goes on with a rank that has just given up.
        if store.add(f"{key}/decisions", 1) == 1:
            store.set(f"{key}/verdict", verdict)

    try:
        if store.add(f"{key}/arrived", 1) == dist.get_world_size():
            decide("all")
        try:
            store.wait([f"{key}/verdict"], timeout)
        except RuntimeError:
            decide("not all")
        return bool(store.get(f"{key}/verdict") == b"all")
    except RuntimeError:  # the store has gone with the rank that serves it
        return False


_meshes: dict[tuple[ParallelLayout, str], tuple[weakref.ref[Any], ParallelMesh]] = {}


def _shared_mesh(layout: ParallelLayout, device_type: str) -> ParallelMesh:
    """Build the mesh of a layout once in the life of a process group: each new one has communicators of its own."""
    world, mesh = _meshes.get((layout, device_type), (lambda: None, None))
    if mesh is None or world() is not dist.group.WORLD:
        mesh = layout.build_mesh(device_type)
        # Weak: a process group that outlives `destroy_process_group` may abort the interpreter's exit.
        _meshes[layout, device_type] = weakref.ref(dist.group.WORLD), mesh
    return mesh


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # A thread of gloo lets go of the tensors of the last collective after that has completed, and needs the
        # interpreter for it: once that is ending, the process would abort. Sleeping lets the thread through.
        time.sleep(_LAST_BREATH)
