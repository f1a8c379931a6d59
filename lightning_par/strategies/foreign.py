"""The separate packages `pytorch_lightning` and `lightning_fabric`: refused with the import to change.

They hold the same code as `lightning.pytorch` and `lightning.fabric` under other names, so none of their classes is an
instance of the classes here, and Lightning's own errors about that do not say what to change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lightning_par.errors import ParallelConfigError, Problem, Problems

_PACKAGES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def package_of(thing: object) -> str | None:
    """Name the separate package that one of the classes of `thing` comes from, or None."""
    packages = (cls.__module__.partition(".")[0] for cls in type(thing).__mro__)
    return next((package for package in packages if package in _PACKAGES), None)


def problem(what: str, package: str) -> Problem:
    """The problem that `what` is of a separate package."""
    instead = _PACKAGES[package]
    return Problem(
        f"{what} is one of the separate package `{package}`, and the strategies of lightning_par are for `{instead}`, "
        "which has the same classes once more",
        f"import {instead} (in place of `import {package}`), everywhere",
    )


def refuse_host(plugin: object) -> None:
    """Refuse a Trainer or Fabric of a separate package by the plugin that it hands to its strategy."""
    package = package_of(plugin)
    if package is not None:
        raise ParallelConfigError(problem("the Trainer" if package == "pytorch_lightning" else "Fabric", package))


def refuse(things: Iterable[tuple[str, object]]) -> None:
    """Refuse everything of a separate package; each thing comes with what it is."""
    problems = Problems()
    for kind, thing in things:
        package = package_of(thing)
        if package is not None:
            problems.extend([problem(f"the {kind} {type(thing).__name__}", package)])
    problems.raise_if_any()


def introduce(strategy: type) -> None:
    """Let the separate packages, where they are imported, take a strategy, which then says what to change."""
    for package in _PACKAGES:
        module = sys.modules.get(f"{package}.strategies")
        if module is not None:
            module.Strategy.register(strategy)


def register(for_trainer: dict[str, Any], for_fabric: dict[str, Any]) -> None:
    """Register the names of strategies with the separate packages that are imported, for the same reason."""
    for name, registry, strategies in (
        ("pytorch_lightning.strategies", "StrategyRegistry", for_trainer),
        ("lightning_fabric.strategies", "STRATEGY_REGISTRY", for_fabric),
    ):
        if name in sys.modules:
            for key, strategy in strategies.items():
                getattr(sys.modules[name], registry).register(key, strategy, override=True)
