"""CUDA does not survive a fork: in a child of a process that used it, every call fails, some of them much later.

So a plan for a GPU refuses there at once, in words. Plans for the CPU work in children.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .errors import DriverError

_used_before = False
_broken = False


def _before() -> None:
    global _used_before
    _used_before = torch.cuda.is_initialized()


def _in_child() -> None:
    global _broken
    _broken = _broken or _used_before


def cuda_is_broken() -> bool:
    """Whether this process was forked from one that had used CUDA."""
    return _broken


def check() -> None:
    """Raises DriverError where CUDA cannot work in this process."""
    if _broken:
        refuse()


def refuse(*_: Any) -> Any:
    raise DriverError(
        "CUDA: given a process that was forked from one that had used CUDA, expected one that was spawned: CUDA does not "
        "survive a fork; start workers with multiprocessing.get_context('spawn') or 'forkserver' (DataLoader: "
        "multiprocessing_context='spawn'), or fork before the first use of CUDA")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)
