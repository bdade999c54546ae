"""The attention op graph that a user builds: op nodes and tensor nodes in one networkx DAG.

Methods only record. What a graph means is judged by `frost.validate`, all at once, so that every engine sees
the same rules; only arguments of a hopeless type are refused on the spot.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx

from descriptors import Dims, DimsLike, DType, TensorDesc
from frost.errors import GraphError
from frost.nsa_graph import NsaOps
from frost.opset import OPS
from frost.options import named_options

if TYPE_CHECKING:
    from frost.plan import Plan

Window = tuple["int | None", "int | None"]


class Tensor:
    """A tensor of a graph: a declared input, or the result `field` of the op `producer`."""

    __slots__ = ("desc", "field", "graph", "name", "producer")

    def __init__(self, graph: Graph, name: str, desc: TensorDesc, producer: OpNode | None = None,
                 field: str = "") -> None:
        self.graph, self.name, self.desc, self.producer, self.field = graph, name, desc, producer, field

    @property
    def shape(self) -> Dims:
        return self.desc.shape

    @property
    def stride(self) -> Dims:
        """In elements: as declared, or the row-major strides of the current shape."""
        return self.desc.strides

    @property
    def dtype(self) -> DType:
        return self.desc.dtype

    @property
    def is_input(self) -> bool:
        return self.producer is None

    def set_shape(self, shape: DimsLike) -> None:
        """Give an input another shape. Every stride that was not declared follows, here and in all results.

        Raises GraphError for a result (its shape follows from the operands) and where declared strides have
        another rank.
        """
        if self.producer is not None:
            raise GraphError(f"tensor {self.name!r}: given a shape, expected none: it is a result of "
                             f"{self.producer.name!r}; change the shape of an input instead")
        self.desc = _desc(self.name, shape, self.desc.dtype, self.desc.stride, self.desc.alignment)
        self.graph._infer_all()

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.desc}>"


@dataclass(eq=False)
class OpNode:
    """One op as recorded: operands and results by field name, attributes as the user gave them."""

    name: str
    op: str
    index: int
    inputs: dict[str, Tensor]
    attrs: dict[str, Any]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def infer(self) -> dict[str, TensorDesc]:
        """The descriptors of its results, from the operands' current ones."""
        return OPS[self.op].infer({name: t.desc for name, t in self.inputs.items()}, self.attrs)

    def __repr__(self) -> str:
        return f"<{self.op} {self.name!r}>"


@dataclass(frozen=True)
class Output:
    """A tensor that `execute` hands out under `name`. Only a declared stride is authoritative."""

    name: str
    tensor: Tensor
    stride: Dims | None = None
    alignment: int = 16

    @property
    def desc(self) -> TensorDesc:
        return replace(self.tensor.desc, stride=self.stride, alignment=self.alignment)


class SdpaGrads(NamedTuple):
    """Results of `Graph.sdpa_backward`; None where not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None


class Graph(NsaOps):
    """An attention op graph. Build it with the methods below (and those of `NsaOps`), then `compile` it into a plan.

    `dag` is the networkx graph (nodes are `Tensor` and `OpNode` objects, edges carry the field names).
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.dag = nx.DiGraph()
        self.ops: list[OpNode] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Output] = []
        self._names: set[str] = set()
        self._numbered: dict[str, int] = {}  # by base name, the last number that was given

    # ---- declarations

    @named_options
    def tensor(self, name: str, shape: DimsLike, *, stride: DimsLike | None = None, dtype: object,
               alignment: int = 16) -> Tensor:
        """Declare an input. `shape`: ints or `frost.sym(...)`; `stride` in elements, None means row-major.

        `dtype`: "bf16", torch.bfloat16 or a DType. `alignment`: bytes that the base pointer promises, checked at bind.
        Raises TypeError or GraphError where the parts do not make a descriptor.
        """
        return self._declare(name, _desc(name, shape, dtype, stride, alignment))

    def tensor_like(self, name: str, tensor: Any) -> Tensor:
        """Declare an input with the shape, strides, dtype and pointer alignment of a torch tensor."""
        itemsize = DType.parse(tensor.dtype).itemsize
        aligned = tensor.data_ptr() % 16 == 0
        return self.tensor(name, tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype,
                           alignment=16 if aligned else itemsize)

    @named_options
    def output(self, t: Tensor, *, name: str | None = None, stride: DimsLike | None = None,
               dtype: object = None, alignment: int = 16) -> Tensor:
        """Hand out `t` under `name` (its own by default), in `dtype` (a cast is added where it differs).

        A declared `stride` (elements) is how the caller's buffer is laid out; otherwise it is row-major. A tensor
        may be handed out more than once: each further time is a copy. Returns the tensor that is handed out.
        """
        _check_tensors("output", {"t": t})
        name = t.name if name is None else name
        wanted = t.dtype if dtype is None else DType.parse(dtype)
        if t.graph is self and (wanted is not t.dtype or any(out.tensor is t for out in self.outputs)):
            t = self.cast(t, wanted)
        stride = None if stride is None else tuple(stride)
        declared = None if stride is None else _desc(name, (1,) * len(stride), wanted, stride, 16).stride
        self.outputs.append(Output(name, t, declared, alignment))
        self._names.add(str(name))
        return t

    # ---- attention

    @named_options
    def sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False,
        align: str = "top_left", window: Window = (None, None), bias: Tensor | None = None,
        mask: Tensor | None = None, sink: Tensor | None = None, softcap: float | None = None,
        seq_len_q: Tensor | None = None, seq_len_kv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
        stats: bool = False, name: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention forward: (o, lse), lse None without `stats`.

        q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], o [B, Hq, Sq, Dv], lse [B, Hq, Sq] fp32, natural
        log. Packed: q [T, Hq, D] and so on with `cu_seqlens_*` [B + 1] int32 or int64; lse [T, Hq]. Hq is a
        multiple of Hk. scale: None means D ** -0.5. causal and window (left, right; None = unbounded, ends
        inclusive) count from the corner `align` ("top_left" or "bottom_right"). bias (added) and boolean mask
        (True keeps): 2 to 4 dims, broadcastable to [B, Hq, Sq, Sk]; packed [1|B, 1|Hq, 1|max_q, 1|max_kv].
        sink [Hq]. softcap c: c * tanh(score / c); 0 is off. seq_len_* [B]: padding lengths.
        """
        tensors = {
            "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sink": sink, "seq_len_q": seq_len_q,
            "seq_len_kv": seq_len_kv, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
        node = self._record("sdpa", tensors, {
            "causal": causal, "align": align, "window": window, "scale": scale, "softcap": softcap,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv, "stats": stats}, name)
        return node.outputs["o"], node.outputs.get("lse")

    @named_options
    def sdpa_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor | None, *,
        scale: float | None = None, causal: bool = False, align: str = "top_left",
        window: Window = (None, None), bias: Tensor | None = None, mask: Tensor | None = None,
        sink: Tensor | None = None, softcap: float | None = None, seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
        dlse: Tensor | None = None, dbias: bool = False, dsink: bool = False,
        grads: Sequence[str] = ("q", "k", "v"), deterministic: bool = False, name: str | None = None,
    ) -> SdpaGrads:
        """Attention backward: (dq, dk, dv, dbias, dsink), each like its operand, None where not asked for.

        Operands and options as in `sdpa`; o and lse are the forward's results, do [as o] and dlse [as lse] their
        gradients. `grads`: which of "q", "k", "v" get one. `dbias` and `dsink` ask for theirs. `deterministic`:
        bit-equal from run to run.
        """
        tensors = {
            "q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "bias": bias, "mask": mask, "sink": sink,
            "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv, "dlse": dlse}
        node = self._record("sdpa_backward", tensors, {
            "causal": causal, "align": align, "window": window, "scale": scale, "softcap": softcap,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv, "dbias": dbias, "dsink": dsink,
            "grads": tuple(grads), "deterministic": deterministic}, name)
        return SdpaGrads(*(node.outputs.get(f) for f in SdpaGrads._fields))

    # ---- primitives

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a [.., M, K] @ b [.., K, N]; leading dims broadcast; equal dtypes."""
        return self._primitive("matmul", x=a, y=b)

    @named_options
    def scale(self, x: Tensor, s: float) -> Tensor:
        """x times a Python number."""
        return self._primitive("scale", x=x, attrs={"value": s})

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b with numpy's broadcasting; equal dtypes (`cast` first otherwise)."""
        return self._primitive("add", x=a, y=b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b with numpy's broadcasting; equal dtypes."""
        return self._primitive("sub", x=a, y=b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b with numpy's broadcasting; equal dtypes. For a Python number use `scale`."""
        return self._primitive("mul", x=a, y=b)

    @named_options
    def softmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """Softmax along `axis`, in x's dtype. A slice that is all -inf gives zeros."""
        return self._primitive("softmax", x=x, attrs={"axis": axis})

    @named_options
    def where(self, mask: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        """a where the boolean `mask` is True, b elsewhere, with numpy's broadcasting.

        b may be the number -inf (masked scores) or 0; for any other value pass a tensor.
        """
        if isinstance(b, (int, float)) and not isinstance(b, bool):
            if b == -math.inf:
                return self.mask_fill(a, mask)
            if b != 0:
                raise TypeError(f"where: b: given the number {b!r}, expected -inf, 0 or a tensor; masked scores "
                                "are -inf here, never a finite stand-in")
            b = self._primitive("zeros_like", x=a)
        return self._primitive("where", x=mask, y=a, z=b)

    def mask_fill(self, x: Tensor, mask: Tensor) -> Tensor:
        """x where the boolean `mask` is True, -inf elsewhere."""
        return self._primitive("mask_fill", x=x, y=mask)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._primitive("sigmoid", x=x)

    def tanh(self, x: Tensor) -> Tensor:
        return self._primitive("tanh", x=x)

    @named_options
    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        """Reorder the dims: result dim i is x's dim perm[i] (negative ones count from the end)."""
        _check_tensors("transpose", {"x": x})
        dims = tuple(p + x.desc.rank if isinstance(p, int) and p < 0 else p for p in perm)
        return self._primitive("transpose", x=x, attrs={"perm": dims})

    @named_options
    def reshape(self, x: Tensor, shape: DimsLike) -> Tensor:
        """The same elements in row-major order under another shape; one extent may be -1."""
        return self._primitive("reshape", x=x, attrs={"shape": _desc("reshape", shape, DType.F32, None, 1).shape})

    @named_options
    def cast(self, x: Tensor, dtype: object) -> Tensor:
        """x in another dtype (a copy where it is the same)."""
        return self._primitive("cast", x=x, attrs={"dtype": DType.parse(dtype)})

    # ---- what is done with a graph

    def validate(self) -> None:
        """Raise GraphError with every violation, one a line."""
        from frost.validate import validate
        validate(self)

    @named_options
    def compile(self, device: object = None, *, engines: Sequence[str] | None = None,
                gates: str | None = None) -> Plan:
        """Validate, fuse, route and compile. `device`: a torch device or its name; None means the current one.

        `engines`: None asks every engine in the registry's order; a list asks these only, in this order, and
        raises NotSupportedError where none serves. `gates`: "require", "auto" or "off"; None means FROST_GATES
        or "require".
        """
        from frost.plan import compile_graph
        return compile_graph(self, device, engines=engines, gates=gates)

    def to_bytes(self) -> bytes:
        """The graph as msgpack."""
        from frost.graph_io import graph_to_bytes
        return graph_to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> Graph:
        """The inverse of `to_bytes`. Raises GraphError or descriptors.WireError, whatever the bytes are."""
        from frost.graph_io import graph_from_bytes
        return graph_from_bytes(data)

    def same_as(self, other: Graph) -> bool:
        """Whether both record the same declarations, ops and outputs, names included."""
        return self.to_bytes() == other.to_bytes()

    def to_dot(self) -> str:
        """The graph in graphviz' language."""
        from frost.draw import to_dot
        return to_dot(self)

    def to_svg(self) -> str:
        """A drawing. Needs graphviz' `dot`; raises NotSupportedError where it is missing."""
        from frost.draw import to_svg
        return to_svg(self)

    def to_text(self) -> str:
        """The graph as a tree of text, from the outputs down."""
        from frost.draw import to_text
        return to_text(self)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self.inputs)} inputs, {len(self.ops)} ops, {len(self.outputs)} outputs>"

    # ---- recording

    def _primitive(self, op: str, *, attrs: Mapping[str, Any] | None = None, **tensors: Any) -> Tensor:
        return self._record(op, tensors, dict(attrs or {}), None).outputs["out"]

    def _record(self, op: str, tensors: Mapping[str, Any], attrs: dict[str, Any], name: str | None) -> OpNode:
        """Add an op node, its results and their edges. Foreign tensors are recorded, and reported by validation."""
        spec = OPS[op]
        given = {f: t for f, t in tensors.items() if t is not None or f in spec.required}
        _check_tensors(op, given)
        attrs = {n: _plain(value) for n, value in attrs.items()}
        node = OpNode(self._unique(name or op), op, len(self.ops), given, attrs)
        for result, desc in node.infer().items():
            base = node.name if result == "out" else f"{name}.{result}" if name else result
            label = base if base == node.name else self._unique(base)
            node.outputs[result] = Tensor(self, label, desc, node, result)
        self._append(node)
        self._attach(node, given)
        return node

    def _declare(self, name: str, desc: TensorDesc) -> Tensor:
        made = Tensor(self, name, desc)
        self.inputs.append(made)
        self._names.add(str(name))
        self.dag.add_node(made)
        return made

    def _append(self, node: OpNode) -> None:
        """Take in a node with its results."""
        self.ops.append(node)
        self._names.update((node.name, *(t.name for t in node.outputs.values())))
        self.dag.add_node(node)
        self.dag.add_edges_from((node, t) for t in node.outputs.values())

    def _attach(self, node: OpNode, operands: Mapping[str, Tensor]) -> None:
        """Give a node its operands."""
        node.inputs = dict(operands)
        self.dag.add_edges_from((t, node) for t in operands.values() if t.graph is self)

    def _unique(self, base: str) -> str:
        name, n = base, self._numbered.get(base, 0)
        while name in self._names:
            n += 1
            name = f"{base}_{n}"
        self._numbered[base] = n
        self._names.add(name)
        return name

    def _infer_all(self) -> None:
        for node in self.ops:
            for result, desc in node.infer().items():
                node.outputs[result].desc = desc


def _desc(name: object, shape: DimsLike, dtype: object, stride: DimsLike | None, alignment: int) -> TensorDesc:
    try:
        return TensorDesc.make(shape, dtype, stride, alignment)
    except TypeError as e:
        raise TypeError(f"tensor {name!r}: {e}") from None
    except ValueError as e:
        raise GraphError(f"tensor {name!r}: {e}") from None


def _plain(value: Any) -> Any:
    """numpy scalars as Python numbers and lists as tuples, so that equal options are equal; all else as given."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _check_tensors(op: str, tensors: Mapping[str, Any]) -> None:
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        hint = "; for a Python number use scale(x, s)" if number and op in ("add", "sub", "mul") else \
            "; declare it with g.tensor(...) or g.tensor_like(...)"
        raise TypeError(f"{op}: {name}: given {type(value).__name__}, expected a tensor of the graph{hint}")
