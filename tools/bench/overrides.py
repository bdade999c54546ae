"""Running the Triton engine with other tiles than its tables have, for one run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

# A tile as its dataclass's arguments: `params.Blocks`, `params_hopper.HopperTile` or `HopperBwdTile`.
Tile = tuple[int | bool | None, ...]
Blocks = tuple[int, int, int, int]


@dataclass(frozen=True)
class Table:
    """Where an engine keeps the tiles of a kernel: a module's tuple of rows, and the type of a tile."""

    module: str
    name: str
    tile: tuple[str, str]

    @property
    def rows(self) -> tuple[Any, ...]:
        return getattr(importlib.import_module(self.module), self.name)

    def put(self, rows: tuple[Any, ...]) -> None:
        setattr(importlib.import_module(self.module), self.name, rows)

    def make(self, tile: Tile) -> Any:
        module, name = self.tile
        return getattr(importlib.import_module(module), name)(*tile)


_BLOCKS = ("engines.triton.params", "Blocks")
TABLES: dict[str, Table] = {
    "fwd": Table("engines.triton.configs", "FWD", _BLOCKS),
    "dkdv": Table("engines.triton.configs_bwd", "DKDV", _BLOCKS),
    "dq": Table("engines.triton.configs_bwd", "DQ", _BLOCKS),
    "fwd_hopper": Table("engines.triton.configs_hopper", "FWD_HOPPER", ("engines.triton.params_hopper", "HopperTile")),
    "bwd_hopper": Table("engines.triton.configs_hopper", "BWD_HOPPER", ("engines.triton.params_hopper", "HopperBwdTile")),
}
# The kernels that serve every descriptor; the others serve some on Hopper cards.
GENERAL = tuple(name for name, table in TABLES.items() if table.tile == _BLOCKS)


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
    if kernel not in GENERAL:
        raise ValueError(f"blocks: given kernel {kernel!r}, expected one of {list(GENERAL)}")
    return kernel, parse_blocks(blocks)


@contextlib.contextmanager
def tiles(overrides: Mapping[str, Tile]) -> Iterator[None]:
    """Every row of a named kernel's table has this tile meanwhile. Where a general kernel is named, no other kernels (those
    of Hopper cards) stand in for it. Plans made outside are forgotten, and so are those made inside: a plan's key does
    not know about this. Compiled kernels are keyed on their tiles and stay."""
    from engines.triton import hopper
    from frost import cache

    saved = [(TABLES[kernel], TABLES[kernel].rows) for kernel in overrides]
    for kernel, tile in overrides.items():
        table = TABLES[kernel]
        made: dict[str, Any] = {"blocks": table.make(tile)}
        if kernel not in GENERAL:  # a row has a second tile there, for problems that are small
            made = {"tile": table.make(tile), "few": None, "few_below": 0}
        table.put(tuple(replace(row, **made) for row in table.rows))
    serves = hopper.serves
    if any(kernel in GENERAL for kernel in overrides):
        hopper.serves = lambda *args, **options: False
    if saved:
        cache.clear()
    try:
        yield
    finally:
        hopper.serves = serves
        for table, rows in reversed(saved):
            table.put(rows)
        if saved:
            cache.clear()
