"""One frozen record per op. A record says what a node *is*; whether somebody can run it is judged elsewhere.

Every field of a record is in exactly one of two lists: `KEY` (changes code or sizes: part of the plan key) or
`RUNTIME` (a value passed at execute). Of the run-time fields those in `PRESENCE` contribute whether they are None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from .dims import Dim
from .errors import WireError
from .masks import MaskDesc
from .tensor import TensorDesc
from .wire import dim_from_wire, dim_to_wire, expect

OpT = TypeVar("OpT", bound="OpDesc")

# Where a packed total (q's or k's token count) stands in a key: the role, never the number.
PACKED_Q, PACKED_KV, PACKED_SEQS = "packed_q", "packed_kv", "packed_seqs"


class OpDesc:
    """Shared behaviour of the op records (all of them frozen dataclasses)."""

    OP: ClassVar[str]
    INPUTS: ClassVar[tuple[str, ...]]      # tensor fields read, in operand order
    OUTPUTS: ClassVar[tuple[str, ...]]     # tensor fields written, in result order
    KEY: ClassVar[tuple[str, ...]]
    RUNTIME: ClassVar[tuple[str, ...]]
    PRESENCE: ClassVar[tuple[str, ...]] = ()
    # Present in every node of the op, so every adapter consumes them.
    BASE: ClassVar[frozenset[str]] = frozenset()

    @property
    def op(self) -> str:
        return self.OP

    def tensors(self) -> Iterator[tuple[str, TensorDesc]]:
        """(field, descriptor) of every operand and result that is present, inputs first."""
        for name in (*self.INPUTS, *self.OUTPUTS):
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def outputs(self) -> Iterator[tuple[str, TensorDesc]]:
        for name in self.OUTPUTS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def bound(self: OpT, bindings: Mapping[str, int] | None) -> OpT:
        """The same op with every symbol bound (None: at its maximum)."""
        changed = {n: t.bound(bindings) for n, t in self.tensors() if t.is_symbolic}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def with_tensors(self: OpT, **tensors: TensorDesc | None) -> OpT:
        return replace(self, **tensors)  # type: ignore[type-var]

    def scalars(self) -> dict[str, Any]:
        """The run-time values, by field name."""
        return {name: getattr(self, name) for name in self.RUNTIME}

    def set_fields(self) -> frozenset[str]:
        """Names of the fields that say something here (differ from their default), beyond `BASE`.

        An adapter must declare that it consumes each of them; otherwise lowering refuses it.
        """
        names: set[str] = set()
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, MaskDesc):
                names |= {n for n, on in (("causal", value.causal), ("window_left", value.left is not None),
                                          ("window_right", value.right is not None),
                                          ("align", value.align != "top_left" and not value.is_full)) if on}
            elif f.name not in self.BASE and f.default is not MISSING and value != f.default:
                names.add(f.name)
        return frozenset(names)

    def key(self) -> tuple:
        """Host scalars and strings only, nested in tuples."""
        parts: list[Any] = [self.OP]
        for name in self.KEY:
            value = getattr(self, name)
            if isinstance(value, TensorDesc):
                value = value.key(self._packed_dims(name))
            elif isinstance(value, MaskDesc):
                value = value.key()
            parts.append((name, value))
        parts += [(name, getattr(self, name) is not None) for name in self.PRESENCE]
        return tuple(parts)

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        """Dims of a tensor field whose extent is a packed total, with the tag that replaces it in the key."""
        return {}


@dataclass(frozen=True)
class _AttentionOptions(OpDesc):
    """What forward and backward share. Shapes: DESIGN section 5, in docs/design.md."""

    q: TensorDesc
    k: TensorDesc
    v: TensorDesc
    o: TensorDesc
    lse: TensorDesc | None = None
    bias: TensorDesc | None = None
    mask: TensorDesc | None = None
    sink: TensorDesc | None = None
    seq_len_q: TensorDesc | None = None
    seq_len_kv: TensorDesc | None = None
    cu_seqlens_q: TensorDesc | None = None
    cu_seqlens_kv: TensorDesc | None = None
    band: MaskDesc = MaskDesc()
    scale: float | None = None
    softcap: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    _TENSOR_OPTIONS: ClassVar[tuple[str, ...]] = (
        "bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def _at(self, tensor: TensorDesc, dense: int, packed: int) -> Dim:
        return tensor.shape[packed if self.packed else dense]

    @property
    def batch(self) -> Dim:
        """Sequences: B, or the number of packed sequences (at least 0)."""
        if self.cu_seqlens_q is not None:
            n = self.cu_seqlens_q.shape[0]
            return n - 1 if isinstance(n, int) else n
        return self.q.shape[0]

    @property
    def heads_q(self) -> Dim:
        return self._at(self.q, 1, 1)

    @property
    def heads_kv(self) -> Dim:
        return self._at(self.k, 1, 1)

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return int(self.heads_q) // int(self.heads_kv) if self.heads_kv else 1  # type: ignore[arg-type]

    @property
    def seqlen_q(self) -> Dim:
        """Rows per (batch, head): Sq, or the packed token total."""
        return self._at(self.q, 2, 0)

    @property
    def seqlen_kv(self) -> Dim:
        return self._at(self.k, 2, 0)

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])  # type: ignore[arg-type]

    @property
    def head_dim_v(self) -> int:
        return int(self.v.shape[-1])  # type: ignore[arg-type]

    @property
    def scale_value(self) -> float:
        """The scale with its default, head_dim^-0.5 of the logical head dim."""
        return float(self.head_dim) ** -0.5 if self.scale is None else float(self.scale)

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        if not self.packed:
            return {}
        return _PACKED_DIMS.get(field, {})


_PACKED_DIMS: dict[str, Mapping[int, str]] = {
    **dict.fromkeys(("q", "o", "lse", "do", "dlse", "dq"), {0: PACKED_Q}),
    **dict.fromkeys(("k", "v", "dk", "dv"), {0: PACKED_KV}),
    **dict.fromkeys(("bias", "mask", "dbias", "cu_seqlens_q", "cu_seqlens_kv"), {0: PACKED_SEQS}),
}

_OPTION_KEY = ("q", "k", "v", "o", "lse", *_AttentionOptions._TENSOR_OPTIONS, "band")
_OPTION_RUNTIME = ("scale", "softcap", "max_seqlen_q", "max_seqlen_kv")


@dataclass(frozen=True)
class SdpaDesc(_AttentionOptions):
    """Attention forward: (o, lse) from q, k, v. `lse` is None unless statistics were asked for."""

    OP: ClassVar[str] = "sdpa"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", *_AttentionOptions._TENSOR_OPTIONS)
    OUTPUTS: ClassVar[tuple[str, ...]] = ("o", "lse")
    KEY: ClassVar[tuple[str, ...]] = _OPTION_KEY
    RUNTIME: ClassVar[tuple[str, ...]] = _OPTION_RUNTIME
    PRESENCE: ClassVar[tuple[str, ...]] = ("softcap",)
    # Run-time values that have a default meaning are always understood.
    BASE: ClassVar[frozenset[str]] = frozenset({"scale", "max_seqlen_q", "max_seqlen_kv"})


@dataclass(frozen=True)
class SdpaBwdDesc(_AttentionOptions):
    """Attention backward: dq, dk, dv, dbias, dsink (None where not asked for) from the forward's operands, o, lse, do."""

    do: TensorDesc | None = None  # never None in a valid graph; a default keeps the dataclass order
    dlse: TensorDesc | None = None
    dq: TensorDesc | None = None
    dk: TensorDesc | None = None
    dv: TensorDesc | None = None
    dbias: TensorDesc | None = None
    dsink: TensorDesc | None = None
    deterministic: bool = False

    OP: ClassVar[str] = "sdpa_backward"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "do", "lse", *_AttentionOptions._TENSOR_OPTIONS, "dlse")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv", "dbias", "dsink")
    KEY: ClassVar[tuple[str, ...]] = (
        *_OPTION_KEY, "do", "dlse", "dq", "dk", "dv", "dbias", "dsink", "deterministic")
    RUNTIME: ClassVar[tuple[str, ...]] = _OPTION_RUNTIME
    PRESENCE: ClassVar[tuple[str, ...]] = ("softcap",)
    BASE: ClassVar[frozenset[str]] = frozenset(
        {"scale", "max_seqlen_q", "max_seqlen_kv", "lse", "do", "dq", "dk", "dv"})


# Primitive ops and their number of tensor inputs. Attributes: scale.value, softmax.axis, transpose.perm, cast (the
# output's dtype says it), reshape and sum_to (the output's shape says it).
PRIMITIVES: dict[str, int] = {
    "matmul": 2, "scale": 1, "add": 2, "sub": 2, "mul": 2, "softmax": 1, "where": 3, "mask_fill": 2, "sigmoid": 1,
    "tanh": 1, "transpose": 1, "reshape": 1, "cast": 1,
    # what backward graphs need
    "sum_to": 1, "softmax_backward": 2, "sigmoid_backward": 2, "tanh_backward": 2, "zeros_like": 1,
}


@dataclass(frozen=True)
class PointwiseDesc(OpDesc):
    """A primitive op (see `PRIMITIVES`); its name is `kind`, and the node's op name too.

    `mask_fill(x, m)` is x where m, -inf elsewhere; `sum_to(x)` sums over the axes along which the output was broadcast;
    `softmax_backward(p, dp)` is p * (dp - sum(p * dp, axis)); `sigmoid_backward(y, dy)`, `tanh_backward(y, dy)` take
    the forward's result. A softmax row that is all -inf gives zeros.
    """

    kind: str
    x: TensorDesc
    y: TensorDesc | None
    z: TensorDesc | None
    out: TensorDesc
    axis: int | None = None
    perm: tuple[int, ...] | None = None
    value: float | None = None
    packed_totals: tuple[tuple[int, str], ...] = ()  # (extent, tag) of leading dims that are packed totals

    OP: ClassVar[str] = "pointwise"
    INPUTS: ClassVar[tuple[str, ...]] = ("x", "y", "z")
    OUTPUTS: ClassVar[tuple[str, ...]] = ("out",)
    KEY: ClassVar[tuple[str, ...]] = ("kind", "x", "y", "z", "out", "axis", "perm")
    RUNTIME: ClassVar[tuple[str, ...]] = ("value", "packed_totals")
    PRESENCE: ClassVar[tuple[str, ...]] = ()
    BASE: ClassVar[frozenset[str]] = frozenset({"axis", "perm", "value", "packed_totals"})

    @property
    def op(self) -> str:
        return self.kind

    def _packed_dims(self, field: str) -> Mapping[int, str]:
        tensor = getattr(self, field)
        tags = dict(self.packed_totals)
        if tensor.rank and isinstance(tensor.shape[0], int) and tensor.shape[0] in tags:
            return {0: tags[tensor.shape[0]]}
        return {}


OP_TYPES: dict[str, type[OpDesc]] = {
    "sdpa": SdpaDesc, "sdpa_backward": SdpaBwdDesc, "pointwise": PointwiseDesc,
}


def op_to_wire(desc: OpDesc) -> dict[str, Any]:
    """A plain map: op name and every field."""
    return {"op": desc.OP, "fields": {f.name: _value_to_wire(getattr(desc, f.name)) for f in fields(desc)}}  # type: ignore[arg-type]


def op_from_wire(value: Any) -> OpDesc:
    """The inverse of `op_to_wire`. Raises WireError."""
    expect(value, dict, "op")
    cls = OP_TYPES.get(expect(value.get("op"), str, "op name"))
    if cls is None or set(value) != {"op", "fields"}:
        raise WireError(f"op: given {value.get('op')!r}, expected one of {sorted(OP_TYPES)} with its fields")
    given = expect(value["fields"], dict, "op fields")
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if set(given) != known:
        raise WireError(f"{cls.OP}: unknown or missing fields {sorted(set(map(str, given)) ^ known)}")
    made = {name: _value_from_wire(v, f"{cls.OP}.{name}") for name, v in given.items()}
    for f in fields(cls):  # type: ignore[arg-type]
        _check_type(made[f.name], str(f.type), f"{cls.OP}.{f.name}")
    return cls(**made)


def _value_to_wire(value: Any) -> Any:
    if isinstance(value, TensorDesc):
        return {"tensor": value.to_wire()}
    if isinstance(value, MaskDesc):
        return {"mask": [value.causal, value.align, value.left, value.right]}
    if isinstance(value, tuple):
        return [_value_to_wire(v) for v in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else dim_to_wire(value)


def _value_from_wire(value: Any, what: str) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return TensorDesc.from_wire(value["tensor"], what)
        if set(value) == {"mask"}:
            parts = expect(value["mask"], list, what)
            if len(parts) != 4:
                raise WireError(f"{what}: given {len(parts)} mask fields, expected 4")
            for part, kind in zip(parts, (bool, str, int, int)):
                if part is not None:
                    expect(part, kind, what)
            return MaskDesc(*parts)
        return dim_from_wire(value, what)
    if isinstance(value, list):
        return tuple(_value_from_wire(v, what) for v in value)
    return value


_WIRE_TYPES: dict[str, tuple[type, ...]] = {
    "TensorDesc": (TensorDesc,), "MaskDesc": (MaskDesc,), "float": (float, int), "int": (int,), "bool": (bool,),
    "str": (str,), "tuple": (tuple,), "None": (type(None),),
}


def _check_type(value: Any, annotation: str, what: str) -> None:
    allowed = tuple(t for part in annotation.split("|") for t in _WIRE_TYPES[part.strip().split("[")[0]])
    expect(value, allowed, what)

