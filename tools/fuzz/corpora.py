"""Valid files of every kind, small ones: what the spoiled ones are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import frost
from descriptors import pack
from descriptors.ops import op_to_wire
from engines.template_loader import Bundle, KernelKey
from frost import gates, routing
from frost.fuse import fuse
from frost.graph import Graph

KEY = KernelKey(
    "triton",
    "sdpa_fwd",
    (("dtype", "bf16"), ("head_dim", 64), ("wide", False), ("tiles", (64, 128))),
    "sm_90",
    "d" * 64,
    (("triton", "3.6"),),
)


def _attention() -> Graph:
    g = Graph("layer")
    b, s = frost.sym("B", max=8), frost.sym("S", max=4096)
    q, k, v = (
        g.tensor(n, (b, 2, s, 8), stride=(16 * 4096, 8, 16, 1), dtype="bf16", alignment=2) for n in "qkv"
    )
    bias, sink = g.tensor("bias", (s, s), dtype="fp32"), g.tensor("sink", (2,), dtype="fp32")
    o, lse = g.sdpa(
        q,
        k,
        v,
        causal=True,
        window=(3, None),
        bias=bias,
        sink=sink,
        scale=0.5,
        softcap=2.0,
        stats=True,
        name="attn",
    )
    g.output(g.reshape(g.transpose(o, (0, 2, 1, 3)), (b, s, -1)), name="y", dtype="fp32")
    assert lse is not None
    g.output(lse, stride=(8192, 4096, 1), name="lse")
    return g


def _packed_backward() -> Graph:
    g = Graph("backward")
    q, k, v, o, do = (g.tensor(n, (7, 2, 8), dtype="fp16") for n in ("q", "k", "v", "o", "do"))
    lse, sink, cu = (
        g.tensor("lse", (7, 2), dtype="fp32"),
        g.tensor("sink", (2,), dtype="fp16"),
        g.tensor("cu", (3,), dtype="int64"),
    )
    made = g.sdpa_backward(
        q,
        k,
        v,
        o,
        do,
        lse,
        sink=sink,
        dsink=True,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=4,
        max_seqlen_kv=4,
        deterministic=True,
        grads=("q", "v"),
    )
    for t in (made.dq, made.dv, made.dsink):
        assert t is not None
        g.output(t)
    return g


def _primitives() -> Graph:
    g = Graph("primitives")
    q, k, v = (g.tensor(n, (2, 3, 5, 4), dtype="fp32") for n in "qkv")
    m = g.tensor("m", (5, 5), dtype="bool")
    p = g.softmax(g.where(m, g.scale(g.matmul(q, g.transpose(k, (0, 1, 3, 2))), 0.5), float("-inf")))
    g.output(g.matmul(p, v), name="o")
    g.output(g.mul(g.sigmoid(q), g.tanh(g.sub(k, v))), name="z", stride=(60, 1, 12, 3))
    return g


def _sparse() -> Graph:
    g = Graph("nsa")
    q = g.tensor("q", (1, 2, 32, 8), dtype="fp32")
    k, v = (g.tensor(n, (1, 1, 32, 8), dtype="fp32") for n in "kv")
    blocks, counts = (
        g.tensor("blocks", (1, 1, 32, 2), dtype="int32"),
        g.tensor("counts", (1, 1, 32), dtype="int32"),
    )
    o, lse = g.nsa_selection(q, k, v, blocks, block_size=16, block_counts=counts, stats=True)
    g.output(o, name="o")
    assert lse is not None
    g.output(lse, name="lse")
    return g


GRAPHS: tuple[Callable[[], Graph], ...] = (_attention, _packed_backward, _primitives, _sparse)


def graphs(folder: Path) -> list[bytes]:
    return [make().to_bytes() for make in GRAPHS]


def plans(folder: Path) -> list[bytes]:
    out = []
    for make, how in zip(
        GRAPHS, ({}, {"engines": ["reference"]}, {"engines": ["triton", "reference"], "gates": "off"}, {})
    ):
        make().compile("cpu", **how).save(folder / "a.plan")  # type: ignore[arg-type]
        out.append((folder / "a.plan").read_bytes())
    return out


def gate_files(folder: Path) -> list[bytes]:
    shapes: Sequence[Any] = ["a", {"name": "b", "shape": [1, 2, 3], "causal": True, "scale": 0.5}]
    for op, how in (
        (
            "sdpa",
            {"errors": {"a": {"o": 0.5, "lse": 0.25}, "b": {"o": float("inf")}}, "declined": {"c": "no"}},
        ),
        ("sdpa_backward", {"errors": None}),
        ("nsa_selection", {"errors": 0.5}),
    ):
        gates.write_equivalence_gate(
            tolerances=1.0, shapes_covered=shapes, op=op, device="sm_90", gate_dir=folder / "gates", **how
        )  # type: ignore[arg-type]
    shipped = [p for p in sorted(gates.shipped_gate_dir().glob("*.json")) if p.stat().st_size < 16_000]
    return [p.read_bytes() for p in [*sorted((folder / "gates").glob("*.json")), *shipped[:1]]]


def _dump() -> routing.Dump:
    log = routing.RoutingLog()
    no = routing.Declined("triton", "gate", "none", "a valid gate", "no gate")
    for i in range(3):
        log.add(
            routing.Route(
                "g", f"node{i}", "sdpa", "torch_sdpa[FLASH_ATTENTION]", (no,), "cpu", gate="not needed"
            )
        )
        log.add(routing.Route("g", f"node{i}", "sdpa", "triton", (), "sm_90", cache_hit=i > 1, gate="passed"))
    return log.dump("unit")


def dumps_msgpack(folder: Path) -> list[bytes]:
    return [
        routing.write_dump(folder / "a.msgpack", d).read_bytes()
        for d in (_dump(), routing.Dump(suite="empty"))
    ]


def dumps_json(folder: Path) -> list[bytes]:
    return [
        routing.write_dump(folder / "a.json", d).read_bytes() for d in (_dump(), routing.Dump(suite="empty"))
    ]


def runs(folder: Path) -> list[bytes]:
    from frost.report import Saved, facts, write_saved

    g = _primitives()
    whole = facts.plan_facts(g, g.compile("cpu"))
    output = {"shape": [2, 3], "dtype": "float32", "nan": 0, "mean": 0.5, "largest": 1.0, "difference": 0.0}
    whole["run"] = {"ms": 0.1, "repeat": 5, "seed": 0, "symbols": {}, "outputs": {"o": output}}
    rows = [
        {"candidate": "MATH", "ms": 0.5, "tflops": 12.0, "status": "ok", "pinned_ms": 0.4, "note": ""},
        {"candidate": "frost[triton]", "ms": None, "tflops": None, "status": "no kernel", "pinned_ms": None},
    ]
    bench = {
        "title": "b4 s512",
        "card": "NVIDIA H200",
        "dtype": "bf16",
        "rows": rows,
        "ceilings": facts.ceilings("NVIDIA H200", "bf16", 1e12, 1e9),
    }
    routing.write_dump(folder / "b.msgpack", _dump())
    saved = Saved(
        graphs=[whole],
        benchmarks=[bench],
        gates=facts.gate_facts(gates.shipped_gate_dir())[:2],
        routing=facts.routing_facts([folder / "b.msgpack"]),
    )
    return [
        write_saved(folder / "a.json", s).read_bytes() for s in (saved, Saved(), Saved(benchmarks=[bench]))
    ]


def csvs(folder: Path) -> list[bytes]:
    head = "suite,case,direction,candidate,route,status,ms,tflops,check,dtype,card\n"
    body = (
        "dense,s2048 d64,fwd,triton,x,ok,0.5,400,0.3,bf16,NVIDIA H200\n"
        'dense,s2048 d64,fwd,flex,"a, b",WRONG,,,off,bf16,NVIDIA H200\n'
        "host,h,fwd,triton,x,ok,,,,bf16,NVIDIA H200\ndense,s1,bwd,triton,x,ok,1e-3,nan,,fp16,other\n"
    )
    return [(head + body).encode(), head.encode(), (head + body * 20).encode()]


def baselines(folder: Path) -> list[bytes]:
    from frost import sdpa_baseline as b

    row = dict.fromkeys(b.SDPA_BACKENDS, 0.5) | {"MATH": float("nan")}
    b.write_sdpa_baseline(
        folder / "b.json", {str(s): row for s in b.SEQLENS}, dict.fromkeys(b.INFO_FIELDS, "x"), 20
    )
    return [(folder / "b.json").read_bytes()]


def bundles(folder: Path) -> list[bytes]:
    meta = {"name": "sdpa_fwd", "threads": 128, "shared": 65536, "kinds": ["ptr", "ptr", "i64", "fp32"]}
    return [Bundle(code, meta).to_bytes(KEY) for code in (b"\x7fELF" + bytes(200), b"")]


def records(folder: Path) -> list[bytes]:
    """Op records, which travel in no file of their own."""
    from descriptors import OP_TYPES

    steps = [step.desc for make in GRAPHS for step in fuse(make()).steps]
    return [pack(op_to_wire(d)) for d in steps if type(d) in OP_TYPES.values()]
