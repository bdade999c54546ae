"""Geometry of a selection call, its workspace, and the launches of the inverse map: what forward and backward share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from descriptors import NsaSelectionBwdDesc, NsaSelectionDesc, TensorDesc
from descriptors.dims import bind_dim
from engines.base import Region, Target

from . import configs_nsa as configs
from .arguments import cdiv, main_values, row_values, used_strides
from .launching import FrozenKernel, Kernel, Scratch, operand
from .params import Arg, Blocks
from .params_nsa import KernelSpec, NsaParams, map_specs, resolve

Selection = NsaSelectionDesc | NsaSelectionBwdDesc
_MAP_BLOCKS = Blocks(16, 16, configs.MAP_WARPS, 1)


def source_files() -> tuple[Path, ...]:
    """Every file whose text reaches a selection kernel."""
    here = Path(__file__).parent
    kernels = here / "kernels"
    shared = (kernels / "common.py", kernels / "bwd_common.py")
    shaping = ("configs_nsa.py", "params_nsa.py", "params_nsa_cmp.py", "params.py", "runtime.py")
    return (*sorted((kernels / "nsa").glob("*.py")), *shared, *(here / name for name in shaping))


class NsaKernel(Kernel):
    """A kernel of `kernels/nsa`."""

    def __init__(self, spec: KernelSpec, shared: NsaParams, blocks: Blocks, target: Target) -> None:
        params: Any = spec.params(shared, blocks)
        super().__init__(spec.module, spec.name, spec.args, params, spec.constexprs(params), blocks.num_warps,
                         blocks.num_stages, target)

    def _resolve(self, table: Any, params: Any) -> tuple[Arg, ...]:
        return resolve(table, params.all)

    def _sources(self) -> tuple[Path, ...]:
        return source_files()


@dataclass(frozen=True)
class Geometry:
    """Sizes of a call, from its bound record. One launch of the chain does the tokens [t0, t0 + tokens), in `parts` of
    `span` tokens, see `kernels/nsa/map.py`.

    Workspace may be sized at larger extents than those of a call, so regions are sized by bounds that grow with every
    extent (`held_...`), which `parts * span` itself does not.
    """

    batches: int      # of a batch stride: 1 when packed
    heads_kv: int
    group: int
    rows: int         # query tokens per head
    keys: int
    slots: int
    tokens: int       # most tokens of one launch
    span: int
    least_span: int   # what `span` would be if there were few blocks
    n_blocks: int
    n_seqs: int
    chunk_rows: int
    pitch: int        # elements of a row of partial results
    itemsize: int
    most: int         # tokens of one launch where there are enough

    @staticmethod
    def make(desc: Selection, width: int, read: int, chunk_rows: int, most: int | None = None) -> Geometry:
        """`width`: elements of a partial result; `read`: elements of a row's operands; `most`: what another Geometry says,
        that of the declared maxima for a bound descriptor. What is held then grows with every extent, so that a workspace for
        the maxima holds any smaller binding."""
        keys, rows, n_seqs = bind_dim(desc.seqlen_kv, None), bind_dim(desc.seqlen_q, None), bind_dim(desc.batch, None)
        n_seqs = max(n_seqs, 0)
        size, itemsize = desc.block_size, desc.q.dtype.itemsize
        batches, heads_kv, group = 1 if desc.packed else n_seqs, bind_dim(desc.heads_kv, None), max(desc.group, 1)
        pitch = cdiv(width, 16 // itemsize) * (16 // itemsize)
        slots = max(desc.slots, 1)
        per_token = max(batches, 1) * heads_kv * group * slots * pitch * itemsize
        if most is None:
            fit = configs.PARTIAL_BYTES // per_token // configs.MIN_TOKENS * configs.MIN_TOKENS
            most = max(configs.MIN_TOKENS, min(configs.MAX_TOKENS, fit))
        tokens = min(rows, most)
        n_blocks = (keys // size + n_seqs + 2 if keys else 0) if desc.packed else cdiv(keys, size)
        least = cdiv(max(configs.PART_BYTES // (group * read * itemsize), 1), configs.MAP_TILE) * configs.MAP_TILE
        wanted = max(least, configs.PART_ROWS * n_blocks // (slots * group))
        tiles = cdiv(cdiv(tokens, cdiv(tokens, wanted)), configs.MAP_TILE) if tokens else 1
        return Geometry(batches, heads_kv, group, rows, keys, desc.slots, tokens, tiles * configs.MAP_TILE, least, n_blocks,
                        n_seqs, chunk_rows, pitch, itemsize, most)

    @property
    def problems(self) -> int:
        """(batch, K/V head) pairs."""
        return self.batches * self.heads_kv

    @property
    def entries(self) -> int:
        """Of a part."""
        return self.span * self.slots

    @property
    def items(self) -> int:
        """Work items of a part: every block's chunks, see `nsa_slots`."""
        return self.entries * self.group // self.chunk_rows + self.n_blocks + 1

    def parts(self, tokens: int) -> int:
        return max(1, cdiv(tokens, self.span))

    @property
    def _most_parts(self) -> int:
        return cdiv(self.tokens, self.least_span) + 1

    @property
    def held_tokens(self) -> int:
        """At least parts * span."""
        return self.tokens + self._most_parts * configs.MAP_TILE

    @property
    def held_blocks(self) -> int:
        """At least parts * n_blocks: a part has so many tokens that a block has PART_ROWS rows on average."""
        by_rows = self.tokens * max(self.slots, 1) * self.group // configs.PART_ROWS + 2 * self.n_blocks
        return min(by_rows, self._most_parts * self.n_blocks)

    @property
    def held_rows(self) -> int:
        """Partial rows of a launch."""
        return self.problems * self.held_tokens * self.slots * self.group

    @property
    def held_items(self) -> int:
        chunks = self.held_tokens * self.slots * self.group // self.chunk_rows
        return self.problems * (chunks + self.held_blocks + self._most_parts)

    def launches(self) -> list[tuple[int, int]]:
        """(t0, tokens); one of no tokens where there are no queries."""
        return [(t0, min(self.tokens, self.rows - t0)) for t0 in range(0, self.rows, self.tokens)] if self.rows else [(0, 0)]

    def map_regions(self) -> dict[str, int]:
        """Region -> numbers of 4 bytes."""
        p, entries = self.problems, self.problems * self.held_tokens * self.slots
        marks = p * (self.held_tokens // configs.MAP_TILE) * self.n_blocks
        return {"place": entries, "marks": marks, "tile_sums": marks, "totals": p * self.held_blocks,
                "offsets": p * (self.held_blocks + self._most_parts), "rows": entries, "items": self.held_items}


def regions(sizes: Mapping[str, int]) -> tuple[Region, ...]:
    """Bytes by name; never empty, so that a kernel that has nothing to read still gets an address."""
    return tuple(Region(name, max(nbytes, 16)) for name, nbytes in sizes.items())


MAP_REGIONS = ("place", "marks", "tile_sums", "totals", "offsets", "rows", "items")


def map_kernels(shared: NsaParams, target: Target) -> dict[str, NsaKernel]:
    return {name: NsaKernel(spec, shared, _MAP_BLOCKS, target) for name, spec in map_specs().items()}


class Chain:
    """Freezes kernels for one bound descriptor: the numbers and pointers that they share."""

    def __init__(self, kernels: Mapping[str, NsaKernel], desc: Any, geometry: Geometry, regions: Mapping[str, str]) -> None:
        """`regions`: element type of the workspace regions beside those of the map."""
        self.kernels, self.desc, self.g = kernels, desc, geometry
        off = 0 if desc.packed else geometry.keys - geometry.rows
        self.values: dict[str, Any] = {
            "heads_kv": geometry.heads_kv, "group": geometry.group, "slots": geometry.slots, "n_seqs": geometry.n_seqs,
            "sk": geometry.keys, "off": off, "chunk_rows": geometry.chunk_rows, "n_blocks": geometry.n_blocks,
            "n_items": geometry.items, "n_entries": geometry.entries, "span": geometry.span, "d": desc.head_dim, "dv": desc.head_dim_v, "scale": desc.scale_value,
            **_index_strides(desc), **self._operand_strides()}
        fields = {n: n for n in ("q", "k", "v", "o", "do", "lse", "dlse")}
        fields |= {"index": "block_indices", "counts": "block_counts", "cu": "cu_seqlens"}
        self.pointers: dict[str, Any] = {
            f"{n}_ptr": operand(desc, field) if hasattr(desc, field) else None for n, field in fields.items()}
        types = {**dict.fromkeys(MAP_REGIONS, "int32"), **regions}
        self.pointers |= {f"{n}_ptr": Scratch(n, dtype) for n, dtype in types.items()}

    def _operand_strides(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for name in ("q", "k", "v", "o", "do"):
            out |= main_values(name, getattr(self.desc, name, None), self.desc.packed)
        for name in ("lse", "dlse"):
            out |= row_values(name, getattr(self.desc, name, None), self.desc.packed)
        return out

    def freeze(self, kernel: str, programs: int, values: Mapping[str, Any] | None = None,
               pointers: Mapping[str, Any] | None = None) -> FrozenKernel:
        return self.kernels[kernel].freeze(programs, {**self.values, **(values or {})},
                                           {**self.pointers, **(pointers or {})})

    def place(self, t0: int, tokens: int) -> dict[str, int]:
        """What every kernel of a launch is told about its tokens."""
        return {"t0": t0, "n_tokens": tokens, "parts": self.g.parts(tokens)}

    def map(self, t0: int, tokens: int) -> list[FrozenKernel]:
        """The inverse map of one launch's tokens."""
        g, here = self.g, self.place(t0, tokens)
        parts, tiles = here["parts"], g.span // configs.MAP_TILE
        problems = g.problems * parts
        groups, items = cdiv(g.n_blocks, configs.MAP_BLOCKS), cdiv(g.items, configs.MAP_ITEMS)
        return [
            self.freeze("nsa_clean", tiles * problems, {**here, "n_tiles": parts * tiles, "n_steps": _steps(g.n_seqs + 2)}),
            self.freeze("nsa_scan", groups * problems, {**here, "n_groups": groups, "n_tiles": tiles}),
            self.freeze("nsa_offsets", problems, here),
            self.freeze("nsa_scatter", tiles * problems, {**here, "n_tiles": tiles}),
            self.freeze("nsa_slots", items * problems, {**here, "n_tiles": items, "n_steps": _steps(g.n_blocks)}),
        ]

    def main(self, name: str, tensor: TensorDesc) -> dict[str, int]:
        return main_values(name, tensor, self.desc.packed)


def _steps(candidates: int) -> int:
    """Halvings that leave one of so many."""
    return max(candidates, 1).bit_length() + 1


def _index_strides(desc: Selection) -> dict[str, int]:
    out: dict[str, int] = {}
    for name, tensor, axes in (("index", desc.block_indices, "bhts"), ("counts", desc.block_counts, "bht")):
        strides: tuple[int, ...] = (0,) * len(axes)
        if tensor is not None:
            strides = used_strides(tensor)
            if desc.packed:
                t, h, *rest = strides
                strides = (0, h, t, *rest)
        out |= {f"stride_{name}_{a}": s for a, s in zip(axes, strides)}
    out["stride_cu"] = 0 if desc.cu_seqlens is None else used_strides(desc.cu_seqlens)[0]
    return out
