"""What a checkpoint notes of the model so that it can be given to other programs: see `export.py`."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from lightning_par.checkpoint.stages import on_all_stages
from lightning_par.checkpoint.state import plain_name, tied_names
from lightning_par.parallel.shards import class_name
from lightning_par.parallel.stages import stages_of


def about_model(module: nn.Module) -> dict[str, Any]:
    """What `save_sharded` stores as `about`: plain values only.

    Under a pipeline this is a collective over its ranks.

    Returns:
        ``{"tied": {name: the first name of the same parameter}, "pretrained": what `pretrained_configs` returns}``.
    """
    twins = {name: first for name, first in tied_names(module).items() if name != first}
    stages = on_all_stages(stages_of(module), lambda: twins)
    tied = {name: first for one in stages for name, first in one.items()}
    return {"tied": tied, "pretrained": pretrained_configs(module)}


def pretrained_configs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of the Hugging Face models in a module, without importing transformers.

    Returns:
        For each that is in no other one, by the prefix of its parameters (empty, or with a dot at its end): ``config``
        and ``generation_config`` (None where it has none) as JSON objects, with the class as the only architecture;
        and ``problem``, why ``from_pretrained`` could not load its parameters by that, or None.
    """
    found = {
        plain_name(name): child
        for name, child in module.named_modules()
        if any(cls.__name__ == "PreTrainedModel" and _package(cls) == "transformers" for cls in type(child).__mro__)
    }
    inner = {id(part) for child in found.values() for part in child.modules() if part is not child}
    return {f"{name}." if name else "": _configs(child) for name, child in found.items() if id(child) not in inner}


def _configs(model: Any) -> dict[str, Any]:
    name = class_name(model)
    found: dict[str, Any] = {"config": {"architectures": [name]}, "generation_config": None, "problem": None}
    if any(_package(type(part)) == "peft" for part in model.modules()):
        return found | {"problem": f"{name} has PEFT adapters in it, which no configuration of its class knows"}
    generation = getattr(model, "generation_config", None)
    try:
        found["config"] = json.loads(model.config.to_json_string()) | found["config"]
        found["generation_config"] = None if generation is None else json.loads(generation.to_json_string())
    except (TypeError, ValueError) as e:
        # A save does not fail for this.
        found["problem"] = f"the configuration of {name} cannot be written as JSON: {e}"
    return found


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]
