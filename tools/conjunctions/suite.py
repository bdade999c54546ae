"""The test suite's own tools, which random cases are built and judged with: the fp64 oracle, the comparison, NaN-poisoned
operands and canaries. They live in tests/, outside any package."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import compare  # type: ignore[import-not-found]  # noqa: E402
import layouts  # type: ignore[import-not-found]  # noqa: E402
from cases import data as case_data  # type: ignore[import-not-found]  # noqa: E402
from cases import graphs as case_graphs  # noqa: E402
from cases.model import Case, Recipe  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["Case", "Recipe", "case_data", "case_graphs", "compare", "layouts"]
