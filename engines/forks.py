"""What a child process made by fork begins anew.

Only the thread that forks lives on in the child. A lock that another thread held at that moment would never be
released there, and a build that another thread was at would never end: who waits for either waits for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

LockT = TypeVar("LockT")


def in_child(renew: Callable[[], Any]) -> None:
    """Have `renew` called in every child process, before anything else of ours runs there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=renew)


def free_in_child(lock: LockT) -> LockT:
    """The lock itself, which will be free in every child process. For locks that live as long as the process."""
    in_child(lock._at_fork_reinit)  # type: ignore[attr-defined]  # what Python's own logging and threading use
    return lock
