"""The records of native sparse attention: selection, compression, attention over compressed keys, block choice.

Layouts: dense q [B, Hq, Tq, D], k [B, Hk, Tk, D], v [B, Hk, Tk, Dv]; packed (with `cu_seqlens` [B + 1]) q [T, Hq, D],
k [T, Hk, D], v [T, Hk, Dv], queries and keys in the same sequences. Dense queries stand at the end of the keys: row i
is at position i + Tk - Tq. Block numbers count from 0 in each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .dims import Dim, is_symbolic
from .ops import OP_TYPES, PACKED_Q, PACKED_SEQS, OpDesc
from .tensor import TensorDesc

PACKED_BLOCKS = "packed_blocks"  # stands for the number of compressed blocks of a packed batch


def compressed_blocks(tokens: int, block_len: int, stride: int) -> int:
    """How many whole blocks of `block_len` tokens start at multiples of `stride` in a sequence."""
    return (tokens - block_len) // stride + 1 if tokens >= block_len else 0


def packed_compressed_blocks(total: int, stride: int) -> int:
    """Rows of a packed compressed tensor: block c of the sequence at offset s lies in row s // stride + c.

    With block_len >= stride no two sequences share a row, whatever their lengths; rows without a block are zero.
    """
    return total // stride


class _NsaOp(OpDesc):
    """What every record with queries says about itself."""

    q: TensorDesc
    k: TensorDesc
    v: TensorDesc
    cu_seqlens: TensorDesc | None
    scale: float | None

    _PACKED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("q", "k", "v", "o", "lse", "do", "dlse", "dq", "dk", "dv", "block_indices", "block_counts",
                         "importance"), PACKED_Q),
        "cu_seqlens": PACKED_SEQS}

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def batch(self) -> Dim:
        """Sequences: B, or the number of packed ones."""
        if self.cu_seqlens is not None:
            n = self.cu_seqlens.shape[0]
            return n if is_symbolic(n) else n - 1  # type: ignore[operator]
        return self.q.shape[0]

    @property
    def heads_q(self) -> Dim:
        return self.q.shape[1]

    @property
    def heads_kv(self) -> Dim:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return int(self.heads_q) // int(self.heads_kv) if self.heads_kv else 1  # type: ignore[arg-type]

    @property
    def seqlen_q(self) -> Dim:
        """Rows per (batch, head): Tq, or the packed token total."""
        return self.q.shape[0 if self.packed else 2]

    @property
    def rows_kv(self) -> Dim:
        """Rows of k per (batch, head): keys or compressed blocks."""
        return self.k.shape[0 if self.packed else 2]

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])  # type: ignore[arg-type]

    @property
    def head_dim_v(self) -> int:
        return int(self.v.shape[-1])  # type: ignore[arg-type]

    @property
    def scale_value(self) -> float:
        return float(self.head_dim) ** -0.5 if self.scale is None else float(self.scale)

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        tag = self._PACKED.get(field) if self.packed else None
        return {} if tag is None else {0: tag}


@dataclass(frozen=True)
class _Selection(_NsaOp):
    """What selection forward and backward share.

    `block_indices` [B, Hk, Tq, S] (packed [T, Hk, S]): each row's entries are a set of blocks of `block_size` keys; an
    entry < 0 or past the last block is no block. `block_counts` [B, Hk, Tq] (packed [T, Hk]): only a row's first n count.
    """

    q: TensorDesc
    k: TensorDesc
    v: TensorDesc
    o: TensorDesc
    block_indices: TensorDesc
    block_size: int
    lse: TensorDesc | None = None
    block_counts: TensorDesc | None = None
    cu_seqlens: TensorDesc | None = None
    scale: float | None = None

    @property
    def seqlen_kv(self) -> Dim:
        return self.rows_kv

    @property
    def slots(self) -> int:
        """Entries of a row, S."""
        return int(self.block_indices.shape[-1])  # type: ignore[arg-type]


_SELECTION_KEY = ("q", "k", "v", "o", "block_indices", "block_size", "lse", "block_counts", "cu_seqlens")


@dataclass(frozen=True)
class NsaSelectionDesc(_Selection):
    """Attention of every query over the blocks that its row names, causal: (o, lse)."""

    OP: ClassVar[str] = "nsa_selection"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "block_indices", "block_counts", "cu_seqlens")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("o", "lse")
    KEY: ClassVar[tuple[str, ...]] = _SELECTION_KEY
    RUNTIME: ClassVar[tuple[str, ...]] = ("scale",)
    BASE: ClassVar[frozenset[str]] = frozenset({"scale"})


@dataclass(frozen=True)
class NsaSelectionBwdDesc(_Selection):
    """Gradients of selection attention; None where not asked for."""

    do: TensorDesc | None = None  # never None in a valid graph
    dlse: TensorDesc | None = None
    dq: TensorDesc | None = None
    dk: TensorDesc | None = None
    dv: TensorDesc | None = None
    deterministic: bool = False

    OP: ClassVar[str] = "nsa_selection_backward"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "do", "lse", "block_indices", "block_counts", "cu_seqlens",
                                         "dlse")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")
    KEY: ClassVar[tuple[str, ...]] = (*_SELECTION_KEY, "do", "dlse", "dq", "dk", "dv", "deterministic")
    RUNTIME: ClassVar[tuple[str, ...]] = ("scale",)
    BASE: ClassVar[frozenset[str]] = frozenset({"scale", "lse", "do", "dq", "dk", "dv"})


@dataclass(frozen=True)
class _Compressed(_NsaOp):
    """What compressed attention forward and backward share.

    k [B, Hk, N, D] and v [B, Hk, N, Dv] hold one row per compressed block (packed: `packed_compressed_blocks` rows).
    Block c covers tokens [c * stride, c * stride + block_len) and is seen by a query at or past its last token.
    `seqlen_kv`: tokens behind the compressed keys, Tk; packed: the longest sequence.
    """

    q: TensorDesc
    k: TensorDesc
    v: TensorDesc
    o: TensorDesc
    block_len: int
    stride: int
    block_size: int
    seqlen_kv: int
    lse: TensorDesc | None = None
    cu_seqlens: TensorDesc | None = None
    scale: float | None = None

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        if self.packed and field in ("k", "v", "dk", "dv"):
            return {0: PACKED_BLOCKS}
        return super()._packed_dims(field)


_COMPRESSED_KEY = ("q", "k", "v", "o", "block_len", "stride", "block_size", "lse", "cu_seqlens")


@dataclass(frozen=True)
class NsaCompressedDesc(_Compressed):
    """Attention over compressed keys: (o, lse, importance).

    importance [B, Hk, Tq, M] fp32 (packed [T, Hk, M]), M = ceil(seqlen_kv / block_size): the probabilities summed over
    the group's heads and over the compressed blocks that overlap selection block m.
    """

    importance: TensorDesc | None = None

    OP: ClassVar[str] = "nsa_compressed_attention"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "cu_seqlens")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("o", "lse", "importance")
    KEY: ClassVar[tuple[str, ...]] = (*_COMPRESSED_KEY, "importance")
    RUNTIME: ClassVar[tuple[str, ...]] = ("seqlen_kv", "scale")
    BASE: ClassVar[frozenset[str]] = frozenset({"scale"})


@dataclass(frozen=True)
class NsaCompressedBwdDesc(_Compressed):
    """Gradients of compressed attention through o and lse; the importance passes none."""

    do: TensorDesc | None = None  # never None in a valid graph
    dlse: TensorDesc | None = None
    dq: TensorDesc | None = None
    dk: TensorDesc | None = None
    dv: TensorDesc | None = None
    deterministic: bool = False

    OP: ClassVar[str] = "nsa_compressed_attention_backward"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "do", "lse", "cu_seqlens", "dlse")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")
    KEY: ClassVar[tuple[str, ...]] = (*_COMPRESSED_KEY, "do", "dlse", "dq", "dk", "dv", "deterministic")
    RUNTIME: ClassVar[tuple[str, ...]] = ("seqlen_kv", "scale")
    BASE: ClassVar[frozenset[str]] = frozenset({"scale", "lse", "do", "dq", "dk", "dv"})


@dataclass(frozen=True)
class NsaCompressDesc(OpDesc):
    """Block pooling of keys or values: x [B, Hk, T, D] -> compressed [B, Hk, N, D'] (packed [T, Hk, D] -> [T // stride, Hk, D']).

    Without weights the mean of each block's tokens. `weights` [block_len, 1 | D]: a weighted sum per channel; weights
    [block_len, D, D']: a linear map of the whole block, summed over its tokens.
    """

    x: TensorDesc
    compressed: TensorDesc
    block_len: int
    stride: int
    weights: TensorDesc | None = None
    cu_seqlens: TensorDesc | None = None

    OP: ClassVar[str] = "nsa_compress"
    INPUTS: ClassVar[tuple[str, ...]] = ("x", "weights", "cu_seqlens")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("compressed",)
    KEY: ClassVar[tuple[str, ...]] = ("x", "compressed", "block_len", "stride", "weights", "cu_seqlens")
    RUNTIME: ClassVar[tuple[str, ...]] = ()

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        if self.cu_seqlens is None:
            return {}
        tag = {"x": PACKED_Q, "compressed": PACKED_BLOCKS, "cu_seqlens": PACKED_SEQS}.get(field)
        return {} if tag is None else {0: tag}


@dataclass(frozen=True)
class NsaCompressBwdDesc(OpDesc):
    """Gradients of block pooling: dx, and dweights where there are weights. `x` is read for dweights only."""

    x: TensorDesc
    dcompressed: TensorDesc
    block_len: int
    stride: int
    weights: TensorDesc | None = None
    cu_seqlens: TensorDesc | None = None
    dx: TensorDesc | None = None
    dweights: TensorDesc | None = None

    OP: ClassVar[str] = "nsa_compress_backward"
    INPUTS: ClassVar[tuple[str, ...]] = ("x", "dcompressed", "weights", "cu_seqlens")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("dx", "dweights")
    KEY: ClassVar[tuple[str, ...]] = ("x", "dcompressed", "block_len", "stride", "weights", "cu_seqlens", "dx", "dweights")
    RUNTIME: ClassVar[tuple[str, ...]] = ()
    BASE: ClassVar[frozenset[str]] = frozenset({"dx"})

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        if self.cu_seqlens is None:
            return {}
        tag = {"x": PACKED_Q, "dx": PACKED_Q, "dcompressed": PACKED_BLOCKS, "cu_seqlens": PACKED_SEQS}.get(field)
        return {} if tag is None else {0: tag}


@dataclass(frozen=True)
class NsaTopkDesc(OpDesc):
    """The blocks a row attends to: importance [B, Hk, Tq, M] -> block_indices [B, Hk, Tq, S] int32 (packed [T, Hk, ..]).

    The first `n_init` blocks and the `n_local` blocks up to the row's own come first, then the most important of the
    rest; equal importance goes to the lower number, NaN counts as -inf. Ascending, -1 where a row has fewer than S
    blocks. `seqlen_kv`: as in `NsaCompressedDesc`.
    """

    importance: TensorDesc
    block_indices: TensorDesc
    block_size: int
    n_init: int
    n_local: int
    seqlen_kv: int
    cu_seqlens: TensorDesc | None = None

    OP: ClassVar[str] = "nsa_topk"
    INPUTS: ClassVar[tuple[str, ...]] = ("importance", "cu_seqlens")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("block_indices",)
    KEY: ClassVar[tuple[str, ...]] = ("importance", "block_indices", "block_size", "n_init", "n_local", "cu_seqlens")
    RUNTIME: ClassVar[tuple[str, ...]] = ("seqlen_kv",)
    BASE: ClassVar[frozenset[str]] = frozenset({"seqlen_kv"})

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        if self.cu_seqlens is None:
            return {}
        return {0: PACKED_SEQS if field == "cu_seqlens" else PACKED_Q}


NSA_TYPES: dict[str, type[OpDesc]] = {cls.OP: cls for cls in (
    NsaSelectionDesc, NsaSelectionBwdDesc, NsaCompressDesc, NsaCompressBwdDesc, NsaCompressedDesc, NsaCompressedBwdDesc,
    NsaTopkDesc)}
OP_TYPES.update(NSA_TYPES)  # one table of records, whichever module they are written in
