"""The suite that needs a GPU. Everything here is marked `gpu`, and skipped as a whole where there is none.

python3 -m pytest tests/gpu -m gpu -q
python3 -m pytest tests/gpu -m "gpu and not slow" -q     without the rows that `frost gate run` proves as well
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import harness  # noqa: E402 - found through the path set above


def _why_not() -> str:
    if harness.DEVICE == "cuda" and not torch.cuda.is_available():
        return "no CUDA device in this process: the GPU suite needs an NVIDIA GPU"
    return ""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if HERE not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def surfaced_errors():
    """An asynchronous error belongs to the test that caused it; memory goes back between tests."""
    yield
    if harness.DEVICE == "cuda":
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > 8 << 30:
            torch.cuda.empty_cache()


# Modules whose tests are rows of an engine's gate matrix (parameter `config`).
ROWS_OF = {"test_gpu_nsa.py": "triton", "test_gpu_sm80.py": "sm80"}


def to_compile(items: Sequence[pytest.Item]) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """((case, op), (row of a gate matrix, engine)) of the tests that were selected."""
    cases, rows = [], []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        engine = ROWS_OF.get(Path(item.path).name)
        if {"case", "op"} <= params.keys():
            cases.append((params["case"], params["op"]))
        elif engine is not None and "config" in params:
            rows.append((params["config"], engine))
    return cases, rows


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Compile what the selected cases and rows need, in parallel and without the device; tests then load it from
    disk."""
    if harness.DEVICE != "cuda" or hasattr(request.config, "workerinput"):
        return
    import compile_ahead

    here = [item for item in request.session.items if HERE in Path(item.path).parents]
    compile_ahead.run(*to_compile(here), torch.cuda.get_device_capability())
