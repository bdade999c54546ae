"""Small graph files that mean a lot of work: what each row of the limits, and each loop over nodes, has to stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from descriptors import LIMITS, pack
from frost.graph import Graph
from frost.opset import OPS

NODES = LIMITS["graph"].counts["nodes"]
TEXT = LIMITS["graph"].max_text

Record = dict[str, Any]


def tensor(name: str, shape: list[Any], dtype: str = "fp32", stride: list[Any] | None = None) -> Record:
    return {"name": name, "desc": {"shape": shape, "dtype": dtype, "stride": stride, "alignment": 16}}


def op(kind: str, inputs: dict[str, int], outputs: dict[str, int], name: str = "n", **attrs: Any) -> Record:
    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    options = {a: plain(v) for a, v in OPS[kind].attrs.items()} | attrs
    made = {f: [number, f"t{number}"] for f, number in outputs.items()}
    return {"name": name, "op": kind, "inputs": inputs, "outputs": made, "attrs": options}


def output(name: str, number: int, stride: list[int] | None = None) -> Record:
    return {"name": name, "tensor": number, "stride": stride, "alignment": 16}


def graph(tensors: list[Record], ops: list[Record], outputs: list[Record], name: str = "g") -> bytes:
    return pack({"schema": 1, "name": name, "tensors": tensors, "ops": ops, "outputs": outputs})


def a_long_chain(nodes: int = NODES) -> bytes:
    """Depth is length: recursion, indentation."""
    n = nodes - 2
    return graph(
        [tensor("x", [2])], [op("tanh", {"x": i}, {"out": i + 1}) for i in range(n)], [output("o", n)]
    )


def every_op_handed_out(nodes: int = NODES) -> bytes:
    """Outputs times ancestors."""
    n = nodes // 2 - 1
    ops = [op("tanh", {"x": i}, {"out": i + 1}) for i in range(n)]
    return graph([tensor("x", [2])], ops, [output(f"o{i}", i + 1) for i in range(n)])


def a_long_name_in_every_message() -> bytes:
    """Violations times names: one tensor of the longest name as every operand of hundreds of bad nodes."""
    n, name = 600, "n" * TEXT
    row = dict.fromkeys(
        ("q", "k", "v", "o", "do", "lse", "bias", "sink", "dlse", "seq_len_q", "cu_seqlens_q"), 0
    )
    ops = [
        op("sdpa_backward", row, {"dq": 3 * i + 1, "dk": 3 * i + 2, "dv": 3 * i + 3}, name[:-8] + f"{i:08}")
        for i in range(n)
    ]
    return graph([tensor(name, [2, 0, 3])], ops, [output(f"o{i}", 3 * i + 1) for i in range(n)])


def a_long_cycle() -> bytes:
    n, name = 3_000, "c" * (TEXT - 8)  # names of 12 MB altogether
    ops = [op("tanh", {"x": 1 + (i - 1) % n}, {"out": 1 + i}, f"{name}{i:08}") for i in range(n)]
    return graph([tensor("x", [2])], ops, [output("o", 1)])


def outputs_that_may_overlap() -> bytes:
    """Exact enumeration of a million elements, for each of thousands of outputs."""
    n = NODES // 2 - 1
    ops = [op("tanh", {"x": 0}, {"out": i + 1}) for i in range(n)]
    return graph(
        [tensor("x", [1023, 1021])],
        ops,
        [output(f"o{i}", i + 1, [1009 + 2 * i, 2003 + 4 * i]) for i in range(n)],
    )


def a_chain_under_every_pattern() -> bytes:
    """Pattern matching walks along the scales of q: a long chain that hundreds of attentions share."""
    tensors = [tensor(n, [1, 2, 4, 4]) for n in ("q", "k", "v")]
    chain, patterns = NODES // 2, NODES // 12
    ops, at, q = [], 3, 0
    for _ in range(chain):
        ops.append(op("scale", {"x": q}, {"out": at}))
        q, at = at, at + 1
    outputs = []
    for i in range(patterns):
        ops += [
            op("transpose", {"x": 1}, {"out": at}, perm=[0, 1, 3, 2]),
            op("matmul", {"x": q, "y": at}, {"out": at + 1}),
            op("softmax", {"x": at + 1}, {"out": at + 2}),
            op("matmul", {"x": at + 2, "y": 2}, {"out": at + 3}),
        ]
        outputs.append(output(f"o{i}", at + 3))
        at += 4
    return graph(tensors, ops, outputs)


def many_packed_totals() -> bytes:
    """Token totals times primitives beside them."""
    n = NODES // 8
    tensors, ops, outputs, at = [], [], [], 0
    for i in range(n):
        tensors += [tensor(f"q{i}", [i + 2, 1, 4]), tensor(f"c{i}", [2], "int32")]
    at = len(tensors)
    for i in range(n):
        ops += [
            op(
                "sdpa",
                {"q": 2 * i, "k": 2 * i, "v": 2 * i, "cu_seqlens_q": 2 * i + 1, "cu_seqlens_kv": 2 * i + 1},
                {"o": at},
            ),
            op("tanh", {"x": at}, {"out": at + 1}),
        ]
        outputs.append(output(f"o{i}", at + 1))
        at += 2
    return graph(tensors, ops, outputs)


def symbols_without_bound() -> bytes:
    huge = 2**64 - 1
    product = {"coef": huge, "of": [{"sym": "S", "max": huge}] * 16}
    q = tensor("q", [{"sym": "S", "max": huge}] * 2, stride=[product, product])
    return graph([q], [op("tanh", {"x": 0}, {"out": 1})], [output("o", 1)])


def a_shape_of_many_dims() -> bytes:
    return graph([tensor("x", [1] * 400_000)], [], [])


def options_of_many_values() -> bytes:
    """Repeated in a message each."""
    ops = [
        op("sdpa", {"q": 0, "k": 0, "v": 0}, {"o": i + 1}, window=[[0] * 20_000, "x" * TEXT])
        for i in range(20)
    ]
    return graph([tensor("q", [1, 1, 1, 1])], ops, [output(f"o{i}", i + 1) for i in range(20)])


def names_that_collide() -> bytes:
    n = NODES // 2
    return graph([tensor("x", [2])] * n, [op("tanh", {"x": 0}, {"out": n})], [output("x", n)])


ATTACKS: dict[str, Callable[[], bytes]] = {
    f.__name__.replace("_", " "): f
    for f in (
        a_long_chain,
        every_op_handed_out,
        a_long_name_in_every_message,
        a_long_cycle,
        outputs_that_may_overlap,
        a_chain_under_every_pattern,
        many_packed_totals,
        symbols_without_bound,
        a_shape_of_many_dims,
        options_of_many_values,
        names_that_collide,
    )
}


def use(data: bytes) -> Graph:
    """Everything that is done with a graph from a file, up to a plan."""
    g = Graph.from_bytes(data)
    g.to_text(), g.to_dot()
    g.validate()
    g.compile("cpu", engines=["reference"])
    return g
