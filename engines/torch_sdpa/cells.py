"""What each of PyTorch's attention backends does exactly, as data.

A `Cell` is one backend on one kind of device for one direction: a capability row and the limits that a row has no word
for. Cells are listed in order of preference. What is left out on purpose, because PyTorch would get it wrong or has no
operator for it: windows, softcap, sinks, boolean masks and bias (keys that are masked leak NaN; an empty row's lse is
0), packed sequences and padding lengths, gradients of bias and sink, a gradient into lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from descriptors import DType, OpDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from engines.base import Capabilities, Reason, Target

__all__ = ["BACKWARD", "FORWARD", "Cell"]

NAME = "torch_sdpa"
_GRID = 65_535  # batches and heads are grid axes of the CUDA backends

AttentionDesc = SdpaDesc | SdpaBwdDesc
Rule = Callable[["Cell", AttentionDesc], Iterator[Reason]]


@dataclass(frozen=True)
class Cell:
    """One backend for one direction. `row.note` names the backend as the route shows it."""

    row: Capabilities
    archs: frozenset[tuple[int, int]] | None = None  # compute capabilities it is right on; None: from row.min_cc up
    causal_square: bool = True  # causal needs Sq = Sk; otherwise Sq >= Sk
    min_seqlen_kv: int = 1
    stride_multiple: int = 1  # elements; 8 of a 16-bit type are one 16-byte vector load
    zero_strides: bool = True  # expanded operands
    grid_limit: int | None = None

    @property
    def backend(self) -> str:
        return self.row.note

    def judge(self, desc: OpDesc, target: Target) -> tuple[Reason, ...]:
        """All reasons why this cell cannot serve the descriptor exactly; empty means that it does."""
        reasons = list(self.row.judge(desc, target))
        if self.archs is not None and target.cc is not None and target.cc not in self.archs:
            wanted = " or ".join(f"sm_{major}{minor}" for major, minor in sorted(self.archs))
            reasons.append(Reason("arch", str(target), wanted))
        if isinstance(desc, (SdpaDesc, SdpaBwdDesc)) and not any(t.is_symbolic for _, t in desc.tensors()):
            for rule in _RULES:
                reasons += rule(self, desc)
        return tuple(reasons)


def _extents(cell: Cell, desc: AttentionDesc) -> Iterator[Reason]:
    named = (("batch", desc.batch), ("heads_q", desc.heads_q), ("seqlen_q", desc.seqlen_q),
             ("seqlen_kv", desc.seqlen_kv))
    for name, extent in named:
        least = cell.min_seqlen_kv if name == "seqlen_kv" else 1
        if extent < least:  # type: ignore[operator]
            yield Reason(name, str(extent), f"at least {least}")
        if cell.grid_limit is not None and not name.startswith("seqlen") and extent > cell.grid_limit:  # type: ignore[operator]
            yield Reason(name, str(extent), f"at most {cell.grid_limit}")


def _band(cell: Cell, desc: AttentionDesc) -> Iterator[Reason]:
    band, sq, sk = desc.band, desc.seqlen_q, desc.seqlen_kv
    if not band.causal:
        return
    if band.align == "bottom_right" and sq != sk:
        yield Reason("align", "bottom_right", "top_left, or Sq = Sk",
                     f"align: got bottom_right with Sq={sq}, Sk={sk}; {cell.backend} aligns causal masks top-left")
    elif cell.causal_square and sq != sk:
        yield Reason("causal", f"Sq={sq}, Sk={sk}", "Sq = Sk")
    elif sq < sk:  # type: ignore[operator]
        yield Reason("causal", f"Sq={sq}, Sk={sk}", "Sq >= Sk",
                     f"causal: got Sq={sq} < Sk={sk}; NaN in the keys that no query sees would leak")


def _layouts(cell: Cell, desc: AttentionDesc) -> Iterator[Reason]:
    names = ("q", "k", "v", "o") if isinstance(desc, SdpaBwdDesc) else ("q", "k", "v")
    for name in names:
        yield from _layout(cell, name, getattr(desc, name))


def _layout(cell: Cell, name: str, tensor: TensorDesc) -> Iterator[Reason]:
    if not tensor.unit_last_stride:
        yield Reason(f"{name}.stride[-1]", str(tensor.strides[-1]), "1")
    for axis, (extent, stride) in enumerate(zip(tensor.shape[:-1], tensor.strides[:-1], strict=True)):
        if extent == 1:
            continue
        if stride % cell.stride_multiple:  # type: ignore[operator]
            yield Reason(f"{name}.stride[{axis}]", str(stride), f"a multiple of {cell.stride_multiple}")
        if stride == 0 and not cell.zero_strides:
            yield Reason(f"{name}.stride[{axis}]", "0", "more than 0")
    if cell.stride_multiple > 1 and tensor.alignment % 16:
        yield Reason(f"{name}.alignment", str(tensor.alignment), "a multiple of 16 bytes")
    if "cuda" in cell.row.devices and tensor.needs_int64:
        yield Reason(name, f"offsets up to {tensor.max_offset}", "offsets below 2**31")


_RULES: tuple[Rule, ...] = (_extents, _band, _layouts)

_HALF = (DType.F16, DType.BF16)
_WIDE = (DType.F64, DType.F32)
_BAND = frozenset({"causal", "align"})
_NO_SM86 = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})


def _row(op: str, backend: str, devices: tuple[str, ...], dtypes: tuple[DType, ...],
         head_dim: tuple[int, int] | None, **limits: object) -> Capabilities:
    extra = frozenset({"lse"}) if op == SdpaDesc.OP else frozenset({"deterministic"} if devices == ("cpu",) else ())
    return Capabilities(NAME, op, devices, dtypes, _BAND | extra, head_dim=head_dim, head_dim_v=head_dim,
                        symbolic=False, allocates=True, note=backend, **limits)  # type: ignore[arg-type]


def _cpu(op: str, dtypes: tuple[DType, ...]) -> Cell:
    return Cell(_row(op, "FLASH_ATTENTION", ("cpu",), dtypes, (1, 1 << 20), equal_head_dims=True), causal_square=False)


def _cudnn(op: str, head_dim: tuple[int, int], archs: frozenset[tuple[int, int]] | None = None) -> Cell:
    row = _row(op, "CUDNN_ATTENTION", ("cuda",), _HALF, head_dim, head_dim_multiple=8, equal_head_dims=True,
               min_cc=(8, 0), deterministic=False)
    return Cell(row, archs, min_seqlen_kv=2, stride_multiple=8, zero_strides=False, grid_limit=_GRID)


def _flash(op: str, head_dim: tuple[int, int], archs: frozenset[tuple[int, int]] | None = None) -> Cell:
    row = _row(op, "FLASH_ATTENTION", ("cuda",), _HALF, head_dim, head_dim_multiple=8, equal_head_dims=True,
               min_cc=(8, 0), deterministic=False)
    return Cell(row, archs, stride_multiple=8, grid_limit=_GRID)


def _efficient(op: str) -> Cell:
    # fp32 is left out: its matrix products may be TF32.
    row = _row(op, "EFFICIENT_ATTENTION", ("cuda",), _HALF, (8, 512), head_dim_multiple=8, groups="mha",
               min_cc=(8, 0), deterministic=False)
    return Cell(row, causal_square=False, stride_multiple=8, zero_strides=False, grid_limit=_GRID)


# The CPU backward adds a group's gradients up in the io dtype: too coarse for 16 bits.
# cuDNN takes head_dim 256 on Hopper only. FLASH has no backward beyond 192 where shared memory is small (sm_86 to
# sm_89, sm_120).
FORWARD: tuple[Cell, ...] = (
    _cpu("sdpa", (*_WIDE, *_HALF)),
    _cudnn("sdpa", (8, 128)),
    _cudnn("sdpa", (256, 256), frozenset({(9, 0)})),
    _flash("sdpa", (8, 256)),
    _efficient("sdpa"),
)
BACKWARD: tuple[Cell, ...] = (
    _cpu("sdpa_backward", _WIDE),
    _cudnn("sdpa_backward", (8, 128)),
    _cudnn("sdpa_backward", (256, 256), frozenset({(9, 0)})),
    _flash("sdpa_backward", (8, 192)),
    _flash("sdpa_backward", (200, 256), _NO_SM86),
    _efficient("sdpa_backward"),
)
