"""TemplateParams: which specialisation of a kernel, and nothing about sizes, pointers or totals.

`TemplateParams` holds what forward and backward share; `FwdParams` adds the forward's own. A kernel's
argument list is a table of (name, kind); `resolve_args` turns it into Triton types and alignment hints for
one set of params, so that the compiled signature is a function of the params alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from descriptors import DType, SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import Dim, SymProduct, dim_max, is_symbolic

DTYPES = {DType.F16: "fp16", DType.BF16: "bf16", DType.F32: "fp32"}
FLOATS = ("fp16", "bf16", "fp32")
FLOATS_AND_FP64 = (*FLOATS, "fp64")
INDEXES = ("int32", "int64")
MAX_HEAD_DIM = 256
MIN_PAD = 16           # the smallest extent of a matrix product
HINT_BYTES = 16        # what `aligned` promises of bases, pitches and head dims
SCORE_OPERANDS = ("bias", "mask", "dbias")
_TILE_REACH = 1024     # no tile has more rows or columns than this
_TRITON_TYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "fp64": "fp64", "int32": "i32",
                 "int64": "i64", "bool": "i8", "uint8": "i8"}


@dataclass(frozen=True)
class Blocks:
    """A tile configuration."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TemplateParams:
    """What every attention kernel is specialised on. Raises ValueError where fields make no sense."""

    dtype: str                 # of q, k, v, o and their gradients
    d_pad: int
    dv_pad: int
    even_d: bool               # d_pad is the true head_dim: no column predicate
    even_dv: bool
    aligned: bool              # bases, pitches and head dims are multiples of 16 bytes, last strides 1
    unit_d: bool               # every main operand's last stride is 1
    wide: bool                 # offsets inside a tile need 64 bits
    has_left: bool
    has_right: bool
    softcap: bool
    mask: bool
    bias: str | None           # dtype where present
    sink: str | None
    len_q: str | None
    len_kv: str | None
    cu_q: str | None           # both set: packed
    cu_kv: str | None
    dot_fp32: bool             # interpreter only: it multiplies the raw bits of bf16

    def __post_init__(self) -> None:
        wrong = [text for text, ok in self._rules() if not ok]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}")

    def _rules(self) -> Iterable[tuple[str, bool]]:
        for name in ("d_pad", "dv_pad"):
            value = getattr(self, name)
            yield (f"{name}: given {value}, expected a power of two in {MIN_PAD}..{MAX_HEAD_DIM}",
                   MIN_PAD <= value <= MAX_HEAD_DIM and value & (value - 1) == 0)
        yield f"dtype: given {self.dtype}, expected one of {FLOATS}", self.dtype in FLOATS
        allowed = {"bias": FLOATS_AND_FP64, "sink": FLOATS_AND_FP64,
                   **dict.fromkeys(("len_q", "len_kv", "cu_q", "cu_kv"), INDEXES)}
        for name, types in allowed.items():
            value = getattr(self, name)
            yield f"{name}: given {value}, expected None or one of {types}", value is None or value in types
        yield "cu_q and cu_kv: expected both or neither", (self.cu_q is None) == (self.cu_kv is None)
        yield "aligned: expected unit_d with it", self.unit_d or not self.aligned
        yield "aligned: expected 32-bit strides with it", not (self.wide and self.aligned)

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def hint(self) -> int:
        """Elements that `aligned` promises strides and head dims to be multiples of."""
        return HINT_BYTES // (4 if self.dtype == "fp32" else 2)

    def items(self) -> tuple[tuple[str, Any], ...]:
        """(field, value) pairs for a kernel key."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    def flags(self) -> dict[str, bool | int]:
        """The constexpr arguments that all kernels share."""
        return {
            "D_PAD": self.d_pad, "DV_PAD": self.dv_pad, "EVEN_D": self.even_d, "EVEN_DV": self.even_dv,
            "PACKED": self.packed, "HAS_LEN_Q": self.len_q is not None, "HAS_LEN_KV": self.len_kv is not None,
            "HAS_LEFT": self.has_left, "HAS_RIGHT": self.has_right, "HAS_BIAS": self.bias is not None,
            "HAS_MASK": self.mask, "HAS_SINK": self.sink is not None, "HAS_SOFTCAP": self.softcap,
            "WIDE": self.wide, "DOT_FP32": self.dot_fp32,
        }


@dataclass(frozen=True)
class FwdParams(TemplateParams):
    """The forward kernel."""

    stats: bool
    blocks: Blocks

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        b = self.blocks
        for name in ("block_m", "block_n"):
            value = getattr(b, name)
            yield (f"{name}: given {value}, expected a power of two in 16..256",
                   16 <= value <= 256 and not value & (value - 1))
        yield f"num_warps: given {b.num_warps}, expected 1, 2, 4 or 8", b.num_warps in (1, 2, 4, 8)
        yield f"num_stages: given {b.num_stages}, expected 1..6", 1 <= b.num_stages <= 6

    def items(self) -> tuple[tuple[str, Any], ...]:
        b = self.blocks
        return (*(p for p in super().items() if p[0] != "blocks"),
                ("block_m", b.block_m), ("block_n", b.block_n), ("num_warps", b.num_warps),
                ("num_stages", b.num_stages))

    def constexprs(self) -> dict[str, bool | int]:
        return {**self.flags(), "HAS_LSE": self.stats, "BLOCK_M": self.blocks.block_m,
                "BLOCK_N": self.blocks.block_n}


def pad_head_dim(d: int) -> int:
    """The power of two that a head dim is padded to inside a kernel."""
    return max(MIN_PAD, 1 << (max(d, 1) - 1).bit_length())


def shared_facts(desc: SdpaDesc | SdpaBwdDesc, main: Sequence[str], others: Sequence[str], *,
                 interpreted: bool) -> dict[str, Any]:
    """The fields of `TemplateParams` for a descriptor. `main` names the operands laid out like q, k, v, o;
    `others` the remaining ones that kernels index with strides (lse, bias, ...)."""
    named = {n: t for n in (*main, *others) if (t := getattr(desc, n, None)) is not None}
    tensors = [t for n, t in named.items() if n in main]
    d, dv = desc.head_dim, desc.head_dim_v
    wide = any(needs_wide(n, t, desc.packed) for n, t in named.items())
    unit_d = all(t.unit_last_stride for t in tensors)
    itemsize = desc.q.dtype.itemsize
    aligned = (unit_d and not wide and d * itemsize % HINT_BYTES == 0 and dv * itemsize % HINT_BYTES == 0
               and all(is_aligned(t, desc.packed) for t in tensors))

    def dtype(name: str) -> str | None:
        tensor = getattr(desc, name)
        return None if tensor is None else str(tensor.dtype)

    return {
        "dtype": DTYPES[desc.q.dtype], "d_pad": pad_head_dim(d), "dv_pad": pad_head_dim(dv),
        "even_d": d == pad_head_dim(d), "even_dv": dv == pad_head_dim(dv), "aligned": aligned,
        "unit_d": unit_d, "wide": wide, "has_left": desc.band.has_left, "has_right": desc.band.has_right,
        "softcap": desc.softcap is not None, "mask": desc.mask is not None, "bias": dtype("bias"),
        "sink": dtype("sink"), "len_q": dtype("seq_len_q"), "len_kv": dtype("seq_len_kv"),
        "cu_q": dtype("cu_seqlens_q"), "cu_kv": dtype("cu_seqlens_kv"), "dot_fp32": interpreted,
    }


_ROW_OPERANDS = ("lse", "dlse")


def needs_wide(name: str, t: TensorDesc, packed: bool) -> bool:
    """Whether a stride, or an offset inside a tile of this operand, could pass 2**31 elements.

    A tile spans the sequence axis (and head_dim) of q, k, v, o; the sequence axis of lse; the last two of a
    bias or mask.
    """
    used = [dim_max(s) if dim_max(d) > 1 or (packed and axis == 0) else 0
            for axis, (d, s) in enumerate(zip(t.shape, t.strides))]
    tile: tuple[int, ...]
    if name in _ROW_OPERANDS:
        tile = (0,) if packed else (2,)
    elif name in SCORE_OPERANDS:
        tile = tuple(range(max(t.rank - 2, 0), t.rank))
    else:
        tile = (0, 2) if packed else (2, 3)
    return max(used, default=0) >= 2**31 or sum(_TILE_REACH * used[axis] for axis in tile) >= 2**31


def is_aligned(t: TensorDesc, packed: bool = False) -> bool:
    """16-byte base, last stride 1 and every other stride that is used a multiple of 16 bytes.

    The leading extent of a packed tensor is a run-time fact: it never counts as 1, or a plan made for one token
    would promise a pitch that only one token has.
    """
    unit = HINT_BYTES // t.dtype.itemsize
    return t.alignment % HINT_BYTES == 0 and t.unit_last_stride and all(
        _factor(s) % unit == 0 for axis, (d, s) in enumerate(zip(t.shape[:-1], t.strides[:-1]))
        if d != 1 or (packed and axis == 0))


def _factor(stride: Dim) -> int:
    """A number that the stride is certain to be a multiple of."""
    if not is_symbolic(stride):
        return int(stride)  # type: ignore[arg-type]
    return stride.coef if isinstance(stride, SymProduct) else 1


@dataclass(frozen=True)
class Arg:
    """One kernel parameter. `kind` packs it ("ptr", "i64", "i32", "fp32"); a constant is compiled in."""

    name: str
    triton_type: str
    kind: str
    divisibility: int = 0
    constant: int | None = None


def resolve_args(table: Iterable[tuple[str, str]], params: TemplateParams) -> tuple[Arg, ...]:
    """Types and hints of a kernel's arguments.

    Kinds: `io*` q, k, v, o and gradients; `fp32*` and other named types; `bias*` `sink*` `len_q*` `len_kv*`
    `cu_q*` `cu_kv*` the type in the field of that name; `mask*` bytes; `pitch` a main operand's stride,
    `unit` its last stride; `stride` any other; `dim` a head dim; `i32`; `fp32`.
    """
    width = "i64" if params.wide else "i32"
    hint = params.hint if params.aligned else 0
    out = []
    for name, kind in table:
        if kind.endswith("*"):
            field = kind[:-1]
            element = {"io": params.dtype, "mask": "bool"}.get(field) or (
                field if field in _TRITON_TYPES else getattr(params, field) or "fp32")
            promised = HINT_BYTES if field == "io" and params.aligned else 0
            out.append(Arg(name, "*" + _TRITON_TYPES[element], "ptr", promised))
        elif kind == "unit" and params.unit_d:
            out.append(Arg(name, "constexpr", width, constant=1))
        elif kind in ("pitch", "unit", "stride"):
            out.append(Arg(name, width, width, hint if kind == "pitch" else 0))
        elif kind == "dim":
            out.append(Arg(name, "i32", "i32", hint))
        else:
            out.append(Arg(name, kind, kind))
    return tuple(out)


def strides(operand: str, axes: str, kind: str = "stride") -> tuple[tuple[str, str], ...]:
    """Stride arguments of one operand: ("q", "bhs") -> stride_qb, stride_qh, stride_qs."""
    return tuple((f"stride_{operand}{a}", kind) for a in axes)


def main_strides(operand: str) -> tuple[tuple[str, str], ...]:
    """The four strides of an operand seen as (batch, head, sequence, head_dim)."""
    return (*strides(operand, "bhs", "pitch"), (f"stride_{operand}d", "unit"))


_OPTIONS = ("bias", "mask", "sink", "len_q", "len_kv", "cu_q", "cu_kv")
OPTION_POINTERS = tuple((f"{n}_ptr", f"{n}*") for n in _OPTIONS)
OPTION_STRIDES = (*strides("bias_", "bhqk"), *strides("mask_", "bhqk"),
                  *((f"stride_{n}", "stride") for n in ("sink", "len_q", "len_kv", "cu_q", "cu_kv")))
FWD_ARGS: tuple[tuple[str, str], ...] = (
    *((f"{n}_ptr", "io*") for n in "qkvo"), ("lse_ptr", "fp32*"), *OPTION_POINTERS,
    *(pair for n in "qkvo" for pair in main_strides(n)), *strides("lse_", "bhs"), *OPTION_STRIDES,
    *((n, "i32") for n in ("n_programs", "n_tiles", "n_seqs", "heads_q", "group", "sq_max", "sk_max")),
    ("d", "dim"), ("dv", "dim"),
    *((n, "i32") for n in ("window_left", "window_right", "align_br")),
    *((n, "i32") for n in ("bias_rows", "bias_cols", "mask_rows", "mask_cols")),
    ("scale", "fp32"), ("softcap", "fp32"),
)
