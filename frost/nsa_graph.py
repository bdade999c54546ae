"""The methods of `Graph` for native sparse attention. They only record; validation judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from frost.options import named_options

if TYPE_CHECKING:
    from frost.graph import OpNode, Tensor


class NsaGrads(NamedTuple):
    """Results of a backward of selection or of compressed attention; None where not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class CompressGrads(NamedTuple):
    """Results of `Graph.nsa_compress_backward`; None where not asked for."""

    dx: Tensor | None
    dweights: Tensor | None


class NsaOps:
    """Mixed into `Graph`. Layouts: dense q [B, Hq, Tq, D], k [B, Hk, Tk, D], v [B, Hk, Tk, Dv], queries at the end of the
    keys; packed with `cu_seqlens` [B + 1] (int32 or int64) q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv]."""

    if TYPE_CHECKING:
        def _record(self, op: str, tensors: Mapping[str, Any], attrs: dict[str, Any], name: str | None) -> OpNode: ...
        def reshape(self, x: Tensor, shape: Any) -> Tensor: ...
        def mul(self, a: Tensor, b: Tensor) -> Tensor: ...
        def add(self, a: Tensor, b: Tensor) -> Tensor: ...

    @named_options
    def nsa_selection(
        self, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, block_size: int,
        block_counts: Tensor | None = None, scale: float | None = None, cu_seqlens: Tensor | None = None,
        stats: bool = False, name: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of each query over the blocks of `block_size` keys that its row names, causal: (o, lse).

        block_indices [B, Hk, Tq, S] (packed [T, Hk, S]), int32 or int64: a row is a set, in any order, duplicates count
        once; an entry < 0 or past the last block is no block, nor is one wholly in the future. block_counts [B, Hk, Tq]
        (packed [T, Hk]): only a row's first n entries count. o [B, Hq, Tq, Dv]; lse [B, Hq, Tq] fp32, natural log, None
        without `stats`. A row without blocks has o = 0, lse = -inf. scale: None means D ** -0.5.
        """
        node = self._record(
            "nsa_selection", {"q": q, "k": k, "v": v, "block_indices": block_indices, "block_counts": block_counts,
                              "cu_seqlens": cu_seqlens},
            {"block_size": block_size, "scale": scale, "stats": stats}, name)
        return node.outputs["o"], node.outputs.get("lse")

    @named_options
    def nsa_selection_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor | None, block_indices: Tensor, *,
        block_size: int, block_counts: Tensor | None = None, scale: float | None = None,
        cu_seqlens: Tensor | None = None, dlse: Tensor | None = None, grads: Sequence[str] = ("q", "k", "v"),
        deterministic: bool = False, name: str | None = None,
    ) -> NsaGrads:
        """Gradients of `nsa_selection`: o and lse are its results, do [as o] and dlse [as lse] their gradients.

        `grads`: which of "q", "k", "v" get one. `deterministic`: bit-equal from run to run. The choice of blocks has
        no gradient.
        """
        node = self._record(
            "nsa_selection_backward",
            {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "block_indices": block_indices,
             "block_counts": block_counts, "cu_seqlens": cu_seqlens, "dlse": dlse},
            {"block_size": block_size, "scale": scale, "grads": tuple(grads), "deterministic": deterministic}, name)
        return NsaGrads(*(node.outputs.get(f) for f in NsaGrads._fields))

    @named_options
    def nsa_compress(self, x: Tensor, *, block_len: int = 32, stride: int = 16, weights: Tensor | None = None,
                     cu_seqlens: Tensor | None = None, name: str | None = None) -> Tensor:
        """Pool blocks of `block_len` tokens that start every `stride` tokens: x [B, Hk, T, D] -> [B, Hk, N, D'].

        N = (T - block_len) // stride + 1 whole blocks (0 in a shorter sequence). Packed: x [T, Hk, D] ->
        [T // stride, Hk, D'], where block c of the sequence at offset s is row s // stride + c and rows without a block
        are zero. weights: None for the mean; [block_len, 1 | D] for a weighted sum per channel; [block_len, D, D'] for a
        linear map of the block. block_len must be at least stride; T must be a number.
        """
        node = self._record("nsa_compress", {"x": x, "weights": weights, "cu_seqlens": cu_seqlens},
                            {"block_len": block_len, "stride": stride}, name)
        return node.outputs["compressed"]

    @named_options
    def nsa_compress_backward(self, x: Tensor, dcompressed: Tensor, *, block_len: int = 32, stride: int = 16,
                              weights: Tensor | None = None, cu_seqlens: Tensor | None = None,
                              grads: Sequence[str] = ("x",), name: str | None = None) -> CompressGrads:
        """Gradients of `nsa_compress` at `dcompressed`. `grads`: which of "x", "weights" get one."""
        node = self._record(
            "nsa_compress_backward", {"x": x, "dcompressed": dcompressed, "weights": weights, "cu_seqlens": cu_seqlens},
            {"block_len": block_len, "stride": stride, "grads": tuple(grads)}, name)
        return CompressGrads(*(node.outputs.get(f) for f in CompressGrads._fields))

    @named_options
    def nsa_compressed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, seqlen_kv: int, block_len: int = 32, stride: int = 16,
        block_size: int = 64, scale: float | None = None, cu_seqlens: Tensor | None = None, stats: bool = False,
        importance: bool = False, name: str | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention over compressed keys: (o, lse, importance), the last two None unless asked for.

        k [B, Hk, N, D] and v [B, Hk, N, Dv] as `nsa_compress` makes them (packed: in its rows). A query sees the blocks
        whose last token is at or before its own. `seqlen_kv`: tokens behind the compressed keys; packed: the longest
        sequence. importance [B, Hk, Tq, ceil(seqlen_kv / block_size)]: probabilities summed over the group's heads and
        over the compressed blocks that overlap each block of `block_size` tokens; it has no gradient.
        """
        node = self._record(
            "nsa_compressed_attention", {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens},
            {"block_len": block_len, "stride": stride, "block_size": block_size, "seqlen_kv": seqlen_kv, "scale": scale,
             "stats": stats, "importance": importance}, name)
        return node.outputs["o"], node.outputs.get("lse"), node.outputs.get("importance")

    @named_options
    def nsa_compressed_attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor | None, *, seqlen_kv: int,
        block_len: int = 32, stride: int = 16, block_size: int = 64, scale: float | None = None,
        cu_seqlens: Tensor | None = None, dlse: Tensor | None = None, grads: Sequence[str] = ("q", "k", "v"),
        deterministic: bool = False, name: str | None = None,
    ) -> NsaGrads:
        """Gradients of `nsa_compressed_attention` through o and lse; operands and options as there."""
        node = self._record(
            "nsa_compressed_attention_backward",
            {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "cu_seqlens": cu_seqlens, "dlse": dlse},
            {"block_len": block_len, "stride": stride, "block_size": block_size, "seqlen_kv": seqlen_kv, "scale": scale,
             "grads": tuple(grads), "deterministic": deterministic}, name)
        return NsaGrads(*(node.outputs.get(f) for f in NsaGrads._fields))

    @named_options
    def nsa_topk(self, importance: Tensor, *, seqlen_kv: int, block_size: int = 64, n_blocks: int = 16, n_init: int = 1,
                 n_local: int = 2, cu_seqlens: Tensor | None = None, name: str | None = None) -> Tensor:
        """The `n_blocks` blocks of each row: importance [B, Hk, Tq, M] -> int32 [B, Hk, Tq, n_blocks] (packed [T, Hk, ..]).

        The first `n_init` blocks and the last `n_local` up to the row's own are always in, then the most important; equal
        importance goes to the lower number. Ascending, -1 where a row has fewer. No gradient passes.
        """
        node = self._record(
            "nsa_topk", {"importance": importance, "cu_seqlens": cu_seqlens},
            {"block_size": block_size, "n_blocks": n_blocks, "n_init": n_init, "n_local": n_local,
             "seqlen_kv": seqlen_kv}, name)
        return node.outputs["block_indices"]

    def nsa_gated_sum(self, outputs: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
        """The sum of outputs [.., Dv], each times its gate [..] (one factor per query and head, in the outputs' dtype)."""
        if len(outputs) != len(gates) or not outputs:
            raise TypeError(f"nsa_gated_sum: given {len(outputs)} outputs and {len(gates)} gates, expected one gate each")
        terms = [self.mul(o, self.reshape(g, (*g.shape, 1))) for o, g in zip(outputs, gates)]
        total = terms[0]
        for term in terms[1:]:
            total = self.add(total, term)
        return total
