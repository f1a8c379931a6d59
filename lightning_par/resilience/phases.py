"""The phases of a step."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["data", "forward_backward", "communication", "optimizer", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
