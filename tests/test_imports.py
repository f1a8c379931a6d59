"""The rooms of the house: who may import whom (design section 3), and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_par

ROOT = Path(lightning_par.__file__).parent
# Later rooms may import earlier ones.
ORDER = [
    {"errors"},
    {"layout", "blocks"},
    {"parallel"},
    {"checkpoint", "resilience", "planner"},
    {"strategies", "callbacks"},
    {"testing", "_rank_worker", "losses"},
    {"cli", "_checkpoint_cli", "_report_cli", "_lightning_cli", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
NO_LIGHTNING = {"errors", "layout", "blocks", "parallel", "checkpoint", "resilience", "planner"}
# ParallelMesh makes its views with the private mesh calls that `parallel/_compat.py` keeps.
ALLOWED = {("layout", "lightning_par.parallel")}


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            if node.module == "lightning_par":
                found |= {f"lightning_par.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no place in the house"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("lightning", "pytorch_lightning", "torchmetrics"):
            assert room not in NO_LIGHTNING, f"{room} knows no Lightning, but {path.name} imports {name}"
        if parts[0] == "lightning_par" and len(parts) > 1 and parts[1] in LEVEL:
            allowed = (room, ".".join(parts[:2])) in ALLOWED
            assert allowed or LEVEL[parts[1]] <= LEVEL[room], f"{path.name} imports {name} from a later room"


@pytest.mark.parametrize("statement", ["import lightning_par", "from lightning_par import ParallelLayout"])
def test_torch_is_not_imported_with_the_package(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_strategies_are_loaded_where_lightning_is_there_already() -> None:
    code = (
        "import importlib, sys; sys.modules['lightning.fabric'] = sys; loaded = []; "
        "importlib.import_module = loaded.append; import lightning_par; "
        "sys.exit(loaded != ['lightning_par.strategies'])"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
def test_names_are_registered_where_lightning_is_there_already() -> None:
    code = (
        "import lightning.fabric, lightning_par; from lightning.fabric.strategies import STRATEGY_REGISTRY as r; "
        "import sys; sys.exit('par_fsdp' not in r)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
