"""`make` as a newcomer meets it: what `make help` says, and what a Python without the packages is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON", "FROST_NO_VENV"))}
    return subprocess.run(["make", "-C", str(ROOT), *arguments], env=env, capture_output=True, text=True, timeout=60,
                          check=False)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python that sees no packages but the standard library."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_help_lists_every_target_and_every_variable() -> None:
    text, makefile = make("help").stdout, (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()) - {"help"}
    assert targets == set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
    for name in ("PYTEST_ARGS", "JOBS", "TEST_TIMEOUT", "BENCH_ARGS", "PYTHON", "FROST_NO_VENV"):
        assert re.search(rf"^  {name}=", text, re.MULTILINE)


@pytest.mark.parametrize(("target", "tools"), [("demo", ""), ("test", ", pytest, hypothesis"), ("lint", ", ruff, mypy"),
                                               ("check", ""), ("bench", ""), ("docs", "")])
def test_missing_packages_are_named_in_one_line(target: str, tools: str, bare: str) -> None:
    done = make(target, "FROST_NO_VENV=1", f"PYTHON={bare}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and len(said) == 1
    assert f" lacks torch, networkx, msgpack, numpy, rich, typer{tools}; install them" in said[0]
