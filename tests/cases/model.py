"""One record per case: what the attention op is, who serves it, where it is routed, and what is in its
buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SERVES: tuple[str, ...] = ()
"""A verdict: the descriptor fields that an engine must name when it declines; empty means that it serves."""

FP64 = "fp64"


@dataclass(frozen=True)
class Recipe:
    """What the buffers hold. `poison`: NaN wherever nothing may be read."""

    seed: int = 0
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_offset: float = 0.0
    masked_rows: tuple[int, ...] = ()  # rows that the boolean mask shuts out altogether
    bias_inf_rows: tuple[int, ...] = ()  # rows whose bias is -inf
    poison: bool = True


@dataclass(frozen=True)
class Case:
    """An attention forward and its backward. Dense unless `cu_q` is given; then `batch` and `seqlens` follow
    from it."""

    name: str
    dtype: str = "fp32"
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # Hq, Hk
    seqlens: tuple[int, int] = (33, 33)  # Sq, Sk; packed: the token totals
    dims: tuple[int, int] = (16, 16)  # D, Dv
    cu_q: tuple[int, ...] | None = None
    cu_kv: tuple[int, ...] | None = None
    index_dtype: str = "int32"
    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    bias: tuple[int, ...] | None = None  # shape
    bias_dtype: str | None = None  # the io dtype where None
    mask: tuple[int, ...] | None = None  # shape
    sink: str | None = None  # dtype
    sink_values: tuple[float, ...] | None = None
    len_q: tuple[int, ...] | None = None
    len_kv: tuple[int, ...] | None = None
    dlse: bool = False
    deterministic: bool = False
    layouts: tuple[tuple[str, str], ...] = ()  # (operand or result, layout name); row-major where not named
    recipe: Recipe = Recipe()
    # Verdicts by engine and direction. The reference serves everything, and Triton everything but fp64 and D
    # > 256. PyTorch's always declines D != Dv, and on the CPU a 16-bit backward (it adds a group's gradients
    # up in 16 bits).
    torch_sdpa: tuple[str, ...] = SERVES
    torch_sdpa_backward: tuple[str, ...] = SERVES
    triton: tuple[str, ...] = SERVES
    ops: tuple[str, ...] = ("sdpa", "sdpa_backward")

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def sequences(self) -> int:
        return len(self.cu_q) - 1 if self.cu_q is not None else self.batch

    def with_(self, name: str, **changes: Any) -> Case:
        return replace(self, name=name, **changes)

    def layout(self, operand: str) -> str:
        return dict(self.layouts).get(operand, "row_major")

    def verdict(self, engine: str, op: str) -> tuple[str, ...]:
        """The fields that `engine` must name when it declines `op` ("sdpa" or "sdpa_backward"); empty: it
        serves."""
        if engine == "torch_sdpa":
            own = self.torch_sdpa if op == "sdpa" else self.torch_sdpa_backward
            too_coarse = op == "sdpa_backward" and self.dtype in ("fp16", "bf16")
            return own + ("dtype",) * too_coarse + ("head_dim_v",) * (self.dims[0] != self.dims[1])
        return self.triton if engine == "triton" else SERVES

    def route(self, op: str) -> str:
        """The engine that `engines=None` gives on a CPU."""
        return "reference" if self.verdict("torch_sdpa", op) else "torch_sdpa"

    def __str__(self) -> str:
        return self.name
