"""Scripts in processes of their own: what a race, a kill or a full disk does can only be seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(script: str, *args: object, **env: str) -> subprocess.Popen[str]:
    """Run a script (dedented) with the checkout and tests/ on its path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[str, str]:
    """Its stdout and stderr; a process that fails, is killed by a signal or does not end fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end within {timeout} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"exit status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return out, err


def wait_until(true: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
        time.sleep(0.005)
