"""What the Trainer shell does with checkpoints, thin over `lightning_par.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par import checkpoint as ckpt
from lightning_par.checkpoint.full import RANKS
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel.random import random_state, set_random_state
from lightning_par.strategies import _compat, averaging, resumption
from lightning_par.strategies.saving import SaveOptions, refuse_wrong_path, save
from lightning_par.strategies.shared import MeshShell, make_way


class SavesCheckpoints(MeshShell, ParallelStrategy):
    """The part of the Trainer's `MeshStrategy` that saves and loads."""

    _run: str
    _average: averaging.Average | None
    resumption: resumption.Resumption
    _resume_directory: tuple[str, ckpt.Verify] | None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state under the names of the unsharded module.

        DTensors with `state_dict_type="sharded"`; otherwise full CPU tensors on rank 0 and nothing elsewhere.
        """
        self._before_collective()
        assert self.lightning_module is not None
        for handle in self._handles:
            handle.data.sync_buffers()
        if self._state_dict_type == "full":
            return ckpt.full_model_state(self.lightning_module)
        return ckpt.model_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        assert self.lightning_module is not None
        if self._state_dict_type == "full":
            return ckpt.full_optimizer_state(self.lightning_module, optimizer)
        return ckpt.optimizer_state(self.lightning_module, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._state_dict_type == "full":
            self._save_file(checkpoint, self.broadcast(filepath), storage_options)
            return
        if storage_options is not None:
            raise ParallelConfigError(
                Problem(
                    "a sharded checkpoint is written by torch, not by a CheckpointIO with storage_options",
                    "state_dict_type='full'",
                )
            )
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        # What goes wrong with one of many checkpoints need not end the run; what a person asked for is told.
        options = SaveOptions(asynchronous=self._async_save and not links(trainer), may_fail=bool(trainer.training))
        self.commit_checkpoint(lambda: checkpoint, filepath, options)

    def commit_checkpoint(
        self, checkpoint: Callable[[], dict[str, Any]], path: str | Path, options: SaveOptions
    ) -> bool:
        """Save a sharded checkpoint; collective.

        Args:
            checkpoint: Makes what the Trainer saves; called when no other save is under way.
            path: The directory.
            options: How.

        Returns:
            Whether a save was begun.
        """
        module = self.lightning_module
        assert module is not None

        def content() -> ckpt.Content:
            meta = checkpoint()
            places = self._places(meta)
            beside = {} if self._average is None else self._average.prepare_checkpoint(meta, full=False)
            model, optimizers = meta.pop("state_dict"), meta.pop("optimizer_states", [])
            return ckpt.content_of(
                model,
                optimizers,
                meta=meta,
                beside=beside,
                about=ckpt.about_model(module),
                rank_state={"loaders": places},
            )

        return save(
            self._saver,
            self.mesh,
            self.broadcast(path),
            content,
            options,
            step=module.trainer.global_step,
            run=self._run,
        )

    def _save_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        failure = f"cannot write the checkpoint {path}"
        places = self._places(checkpoint)
        own = {"random": random_state(), "loaders": places} if places else {}
        # Ranks of a model group keep the same.
        kept = dict(Ranks.of(None).gather_to_first(failure, lambda: (self.mesh.data_rank, own)))
        checkpoint[RANKS] = [kept[data_rank] for data_rank in sorted(kept)]
        if self._average is not None:
            self._average.prepare_checkpoint(checkpoint, full=True)

        def write() -> None:
            if self.is_global_zero:
                make_way(path)
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

        ckpt.together(failure, write)

    def _places(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Where this rank's loaders are, if training is to go on from a checkpoint."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        resumption.without_views(trainer, checkpoint)
        return resumption.rank_state(trainer) if "optimizer_states" in checkpoint else {}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        weights_only = _compat.requested_weights_only() if weights_only is None else weights_only
        assert self.lightning_module is not None
        self._saver.join()
        self._reshard()
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []
        if ckpt.is_sharded_checkpoint(path):
            return self._load_sharded(path, optimizers, bool(weights_only), "size")
        refuse_wrong_path(path)
        checkpoint = dict(self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
        saved = checkpoint.get("optimizer_states")
        if saved is not None and fitting and len(saved) != len(optimizers):
            raise ckpt.CheckpointError(f"{path} holds {len(saved)} optimizers, here are {len(optimizers)}")
        # Of a file without optimizers Lightning says itself that training cannot go on from it.
        for optimizer, state in zip(optimizers, saved or [], strict=False):
            ckpt.load_full_optimizer_state(self.lightning_module, optimizer, state)
        ranks = checkpoint.pop(RANKS, None) or [{}]
        if fitting:
            own = ranks[self.mesh.data_rank] if len(ranks) == self.mesh.data_size else {}
            if "random" in own:
                set_random_state(own["random"])
            self._go_to_places(checkpoint, own.get("loaders", {}), ranks[0].get("loaders", {}))
        return checkpoint

    def resume_from(self, directory: str, verify: ckpt.Verify) -> None:
        """Let the next fit go on from the newest whole checkpoint of a directory, if there is one; before `setup`.

        It is preferred to the `ckpt_path` of `fit`, which is where the first start of the run begins.
        """
        self._resume_directory = directory, verify

    def _go_on(self, directory: str, verify: ckpt.Verify) -> tuple[str, dict[str, Any]] | None:
        weights_only = bool(_compat.requested_weights_only())
        self._reshard()

        def load(path: str) -> tuple[str, dict[str, Any]]:
            return path, self._load_sharded(path, self.optimizers, weights_only, "none")

        try:
            found = ckpt.load_newest(directory, load, verify=verify)
        except ckpt.CheckpointMismatch as e:
            e.add_note(f"To train the changed model from the beginning, save in another directory than {directory}.")
            raise
        if found is not None:
            rank_zero_info(f"The run goes on from {found[0]}.")
            return found
        files = [name for name in (os.listdir(directory) if os.path.isdir(directory) else []) if name.endswith(".ckpt")]
        if files:
            rank_zero_warn(
                f"{directory} holds single files ({', '.join(sorted(files)[:3])}), which an automatic resume does not "
                "look at. To begin with one of them give it as ckpt_path."
            )
        rank_zero_info(f"There is no checkpoint directory in {directory} yet: the run starts afresh.")
        return None

    def go_back(self, directory: str, verify: ckpt.Verify) -> dict[str, Any] | None:
        """Load the newest whole checkpoint of a directory in the middle of a fit; collective.

        Model, optimizers, averages of weights and random state become those of the checkpoint; loops and loaders stay
        where they are.

        Returns:
            The rest of the checkpoint; None if there is none.
        """
        weights_only = bool(_compat.requested_weights_only())
        self._reshard()

        def load(path: str) -> dict[str, Any]:
            return self._load_sharded(path, self.optimizers, weights_only, "none", places=False)

        return ckpt.load_newest(directory, load, verify=verify)

    def _load_sharded(
        self,
        path: str | Path,
        optimizers: list[Optimizer],
        weights_only: bool,
        verify: ckpt.Verify,
        *,
        places: bool = True,
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
        meta = ckpt.load_sharded(
            path,
            self.lightning_module,
            optimizers,
            strict=self.lightning_module.strict_loading,
            weights_only=weights_only,
            verify=verify,
            data_rank=self.mesh.data_rank,
            data_size=self.mesh.data_size,
        )
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fitting and self._average is not None:
            self._average.restore(path, meta)
        if fitting and places:
            self._go_to_places(meta, (meta.own or {}).get("loaders", {}), meta.first.get("loaders", {}))
        return meta

    def _go_to_places(self, meta: dict[str, Any], own: dict[str, Any], first: dict[str, Any]) -> None:
        """Let the loaders go on where a checkpoint was saved; `own` is of this rank's samples, `first` of rank 0's."""
        assert self.lightning_module is not None
        saved = first.get("data_size", 1)
        same = saved == self.mesh.data_size
        resumption.restore(self.lightning_module.trainer, meta, own if same else None, first or None, saved)

    def _reshard(self) -> None:
        for handle in self._handles:
            handle.data.reshard()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # A sharded checkpoint was restored by `load_checkpoint` already.
        if checkpoint.get("state_dict"):
            assert self.lightning_module is not None
            ckpt.load_full_model_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has restored the optimizers."""

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        if os.path.islink(filepath):
            ckpt.remove_checkpoint(filepath)
        elif self._state_dict_type == "sharded":
            # A checkpoint that is being written is not there yet.
            self._saver.remove(filepath)
        elif ckpt.is_sharded_checkpoint(filepath):
            ckpt.remove_checkpoint(filepath)
        else:
            self.checkpoint_io.remove_checkpoint(filepath)


def links(trainer: Any) -> bool:
    """Whether a callback links to a checkpoint when it has asked for it: then it has to be there."""
    return any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks)
