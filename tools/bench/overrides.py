"""Running the Triton engine with other tiles than its tables have, for one run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

# kernel -> (module, table) of the engine
TABLES: dict[str, tuple[str, str]] = {
    "fwd": ("engines.triton.configs", "FWD"),
    "dkdv": ("engines.triton.configs_bwd", "DKDV"),
    "dq": ("engines.triton.configs_bwd", "DQ"),
}
Blocks = tuple[int, int, int, int]


def parse_blocks(text: str) -> Blocks:
    """ "128,64,4,2": BLOCK_M, BLOCK_N, warps, stages. Raises ValueError."""
    parts = text.split(",")
    if len(parts) != 4 or not all(p.strip().isdigit() for p in parts):
        raise ValueError(f"blocks: given {text!r}, expected BLOCK_M,BLOCK_N,warps,stages such as 128,64,4,2")
    m, n, warps, stages = (int(p) for p in parts)
    return m, n, warps, stages


def parse_override(text: str) -> tuple[str, Blocks]:
    """ "fwd=128,64,4,2". Raises ValueError."""
    kernel, _, blocks = text.partition("=")
    if kernel not in TABLES:
        raise ValueError(f"blocks: given kernel {kernel!r}, expected one of {list(TABLES)}")
    return kernel, parse_blocks(blocks)


@contextlib.contextmanager
def tiles(overrides: Mapping[str, Blocks]) -> Iterator[None]:
    """Every row of a named kernel's table has these tiles meanwhile, and no other kernels (those of Hopper cards) stand
    in for it. Plans made outside are forgotten, and so are those made inside: a plan's key does not know about
    this. Compiled kernels are keyed on their tiles and stay."""
    from engines.triton import hopper
    from engines.triton.params import Blocks as Config
    from frost import cache

    saved = []
    for kernel, blocks in overrides.items():
        module_name, table = TABLES[kernel]
        module = importlib.import_module(module_name)
        rows = getattr(module, table)
        saved.append((module, table, rows))
        setattr(module, table, tuple(replace(row, blocks=Config(*blocks)) for row in rows))
    serves = hopper.serves
    if saved:
        hopper.serves = lambda *args, **options: False
        cache.clear()
    try:
        yield
    finally:
        hopper.serves = serves
        for module, table, rows in reversed(saved):
            setattr(module, table, rows)
        if saved:
            cache.clear()
