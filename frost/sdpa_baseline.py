"""The pinned baseline of PyTorch's own attention: milliseconds that one card took, shipped as data.

`python -m tools.sdpa_baseline` measures it, with `frost.backends.benchmark_backends`, and writes the file.
It is there to be compared with: a backend that suddenly takes twice as long on the same card is news.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from descriptors import LIMITS, FrostError, parse_json
from descriptors.limits import read_limited, shown

SCHEMA = 1
SEQLENS = (512, 1024, 2048)
SHAPE: dict[str, Any] = {
    "batch": 4,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bf16",
    "causal": True,
}
SDPA_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
# What is recorded about the machine; all texts.
INFO_FIELDS = ("card", "cc", "driver", "torch", "cuda", "cudnn", "date")


class BaselineError(FrostError, ValueError):
    """A baseline that is damaged, or of another schema."""


def baseline_path() -> Path:
    """The shipped file."""
    return Path(__file__).parent / "data" / "sdpa_baseline.json"


def load_sdpa_baseline() -> dict[str, dict[str, float]]:
    """{"512": {backend: ms, …}, "1024": …, "2048": …}: forward, batch 4, 32/8 heads, d128, bf16, causal;
    NaN where the backend has no kernel for it.

    Raises FileNotFoundError where no baseline is installed and BaselineError (a ValueError) for a damaged file.
    """
    table = _read()["ms"]
    return {
        seq: {name: math.nan if ms is None else float(ms) for name, ms in row.items()}
        for seq, row in table.items()
    }


def sdpa_baseline_info() -> dict[str, Any]:
    """The card, versions and date of the baseline, and the shape it was measured at. Raises as
    `load_sdpa_baseline`.
    """
    content = _read()
    return {**content["info"], **content["shape"], "iters": content["iters"]}


def write_sdpa_baseline(
    path: Path, ms: Mapping[str, Mapping[str, float]], info: Mapping[str, str], iters: int
) -> None:
    """Write a baseline. Raises ValueError where it is not a whole one, OSError where it cannot be written."""
    from engines.template_loader import write_atomically

    table = {
        seq: {n: None if math.isnan(x) else float(f"{x:.6g}") for n, x in row.items()}
        for seq, row in ms.items()
    }
    content = {"schema": SCHEMA, "shape": SHAPE, "iters": iters, "info": dict(info), "ms": table}
    _check(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def _read() -> dict[str, Any]:
    path = baseline_path()
    try:
        content = parse_json(read_limited(path, LIMITS["SDPA baseline"]), LIMITS["SDPA baseline"])
        _check(content)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"SDPA baseline: given no {path}, expected the file that `python -m tools.sdpa_baseline` "
            "writes on a GPU; "
            f"install FROST with its data, or measure one"
        ) from None
    except ValueError as e:
        raise BaselineError(
            f"SDPA baseline {path}: {e}; `python -m tools.sdpa_baseline` writes a new one on a GPU"
        ) from e
    return content


def _check(content: Any) -> None:
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"given no object of schema {SCHEMA}")
    if content.get("shape") != SHAPE:
        raise ValueError(f"shape: given {shown(content.get('shape'))}, expected {SHAPE}")
    info, table = content.get("info"), content.get("ms")
    if not isinstance(info, dict) or not all(isinstance(info.get(name), str) for name in INFO_FIELDS):
        raise ValueError(f"info: given {shown(info)}, expected texts for {', '.join(INFO_FIELDS)}")
    iters = content.get("iters")
    if type(iters) is not int or iters < 1:
        raise ValueError(f"iters: given {shown(iters)}, expected a number of at least 1")
    if not isinstance(table, dict) or set(table) != {str(s) for s in SEQLENS}:
        raise ValueError(f"ms: expected the sequence lengths {SEQLENS}")
    for seq, row in table.items():
        if not isinstance(row, dict) or set(row) != set(SDPA_BACKENDS):
            raise ValueError(f"ms[{seq!r}]: expected the backends {', '.join(SDPA_BACKENDS)}")
        for name, ms in row.items():
            if ms is not None and not (type(ms) in (int, float) and math.isfinite(ms) and ms > 0):
                raise ValueError(f"ms[{seq!r}][{name!r}]: given {shown(ms)}, expected milliseconds > 0, or null")
