"""Small attention graphs by declaration alone, for tests about plans rather than numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from descriptors import Dim
from frost.graph import Graph


@dataclass(frozen=True)
class Spec:
    """One attention op. `strides`, `alignments` by operand or result name; a name not in them is row-major,
    16 bytes."""

    op: str = "sdpa"
    dtype: str = "fp32"
    batch: Dim = 2
    heads: tuple[int, int] = (4, 2)
    seqlens: tuple[Dim, Dim] = (6, 8)  # packed: token totals
    dims: tuple[int, int] = (8, 8)
    packed: bool = False
    sequences: Dim = 3
    offsets: str = "int32"
    lengths: str | None = None  # dtype; both sides
    bias: tuple[Dim, ...] | None = None
    bias_dtype: str | None = None
    mask: tuple[Dim, ...] | None = None
    sink: str | None = None
    stats: bool = True
    dlse: bool = False
    grads: tuple[str, ...] = ("q", "k", "v")
    dbias: bool = False
    dsink: bool = False
    deterministic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    strides: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)
    output_dtype: str | None = None
    prefix: str = ""
    graph: str = "graph"

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)

    def shapes(self) -> dict[str, tuple[tuple[Dim, ...], str]]:
        """(shape, dtype) of every input of the op."""
        (hq, hk), (sq, sk), (d, dv) = self.heads, self.seqlens, self.dims
        io, stats = self.dtype, "fp64" if self.dtype == "fp64" else "fp32"
        rows, keys = ((sq, hq), (sk, hk)) if self.packed else ((self.batch, hq, sq), (self.batch, hk, sk))
        out: dict[str, tuple[tuple[Dim, ...], str]] = {
            "q": ((*rows, d), io),
            "k": ((*keys, d), io),
            "v": ((*keys, dv), io),
        }
        if self.op == "sdpa_backward":
            out |= {"o": ((*rows, dv), io), "do": ((*rows, dv), io), "lse": (rows, stats)}
            if self.dlse:
                out["dlse"] = (rows, stats)
        if self.bias is not None:
            out["bias"] = (self.bias, self.bias_dtype or io)
        if self.mask is not None:
            out["mask"] = (self.mask, "bool")
        if self.sink is not None:
            out["sink"] = ((hq,), self.sink)
        if self.packed:
            bounds = self.sequences + 1 if isinstance(self.sequences, int) else self.sequences
            out |= {"cu_seqlens_q": ((bounds,), self.offsets), "cu_seqlens_kv": ((bounds,), self.offsets)}
        if self.lengths is not None:
            out |= {"seq_len_q": ((self.batch,), self.lengths), "seq_len_kv": ((self.batch,), self.lengths)}
        return out

    def build(self) -> Graph:
        g = Graph(name=self.graph)
        t = {
            name: g.tensor(
                self.prefix + name,
                shape,
                stride=self.strides.get(name),
                dtype=dtype,
                alignment=self.alignments.get(name, 16),
            )
            for name, (shape, dtype) in self.shapes().items()
        }
        options = {
            n: t[n]
            for n in ("bias", "mask", "sink", "cu_seqlens_q", "cu_seqlens_kv", "seq_len_q", "seq_len_kv")
            if n in t
        } | dict(self.options)
        if self.op == "sdpa":
            o, lse = g.sdpa(t["q"], t["k"], t["v"], stats=self.stats, **options)
            results = {"o": o, "lse": lse}
        else:
            results = g.sdpa_backward(
                *(t[n] for n in ("q", "k", "v", "o", "do", "lse")),
                dlse=t.get("dlse"),
                dbias=self.dbias,
                dsink=self.dsink,
                grads=self.grads,
                deterministic=self.deterministic,
                **options,
            )._asdict()
        for name, tensor in results.items():
            if tensor is not None:
                g.output(
                    tensor,
                    name=self.prefix + name,
                    stride=self.strides.get(name),
                    alignment=self.alignments.get(name, 16),
                    dtype=self.output_dtype if name == "o" else None,
                )
        return g
