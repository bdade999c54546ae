"""Native sparse attention as graph ops: rules, shapes, keys, wire, backward graphs, checks of values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from descriptors import NSA_TYPES, op_from_wire, op_to_wire, pack, sym, unpack
from engines.base import Target
from engines.reference.nsa import selection_forward_reference
from frost import BindError, Graph, GraphError, backward_graph, debug
from frost.fuse import fuse
from frost.lowering import Policy
from frost.nsa_autodiff import NSA_RULES as DERIVATIVES
from frost.nsa_opset import NSA_OPS
from frost.plan_key import plan_key
from frost.rules.nsa import NSA_RULES
from frost.validate import validate, violations

DENSE = {"q": (2, 6, 20, 8), "k": (2, 3, 24, 8), "v": (2, 3, 24, 16), "o": (2, 6, 20, 16), "do": (2, 6, 20, 16),
         "lse": (2, 6, 20), "dlse": (2, 6, 20), "block_indices": (2, 3, 20, 4), "block_counts": (2, 3, 20)}
PACKED = {"q": (20, 6, 8), "k": (20, 3, 8), "v": (20, 3, 16), "o": (20, 6, 16), "do": (20, 6, 16), "lse": (20, 6),
          "dlse": (20, 6), "block_indices": (20, 3, 4), "block_counts": (20, 3), "cu_seqlens": (4,)}
TYPES = {"lse": "fp32", "dlse": "fp32", "block_indices": "int32", "block_counts": "int32", "cu_seqlens": "int32"}


def selection(*, packed=False, backward=False, give=(), shapes=None, dtypes=None, without=(), io="bf16", **options):
    """One selection op; `give`: optional operands."""
    g = Graph("case")
    table = {**(PACKED if packed else DENSE), **(shapes or {})}
    names = ["q", "k", "v", "block_indices", *give, *(["o", "do", "lse"] if backward else []),
             *(["cu_seqlens"] if packed else [])]
    types = {**TYPES, **(dtypes or {})}
    t = {n: g.tensor(n, table[n], dtype=types.get(n, io)) for n in names if n not in without}
    extra = {n: t[n] for n in ("block_counts", "cu_seqlens", "dlse") if n in t}
    how = {"block_size": 8, **options}
    if backward:
        made = g.nsa_selection_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t.get("lse"), t["block_indices"], **extra,
                                        **how)
    else:
        made = g.nsa_selection(t["q"], t["k"], t["v"], t["block_indices"], stats=True, **extra, **how)
    for x in made:
        if x is not None:
            g.output(x)
    return g


def compressed(*, packed=False, backward=False, shapes=None, dtypes=None, without=(), **options):
    g = Graph("case")
    q = (40, 6, 8) if packed else (2, 6, 40, 8)
    rows = {"k": (10, 3, 8), "v": (10, 3, 8)} if packed else {"k": (2, 3, 9, 8), "v": (2, 3, 9, 8)}
    table = {"q": q, **rows, "o": q, "do": q, "lse": q[:-1], "dlse": q[:-1], "cu_seqlens": (3,), **(shapes or {})}
    names = ["q", "k", "v", *(["o", "do", "lse"] if backward else []), *(["cu_seqlens"] if packed else [])]
    types = {**TYPES, **(dtypes or {})}
    t = {n: g.tensor(n, table[n], dtype=types.get(n, "bf16")) for n in names if n not in without}
    how = {"seqlen_kv": 40, "block_len": 8, "stride": 4, "block_size": 16, **options}
    extra = {n: t[n] for n in ("cu_seqlens",) if n in t}
    if backward:
        made = g.nsa_compressed_attention_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t.get("lse"), **extra, **how)
    else:
        made = g.nsa_compressed_attention(t["q"], t["k"], t["v"], stats=True, importance=True, **extra, **how)
    for x in made:
        if x is not None:
            g.output(x)
    return g


def pooling(*, packed=False, backward=False, x=None, d=None, weights=None, weights_dtype="bf16", grads=("x",),
            d_dtype="bf16", **options):
    g = Graph("case")
    shape = x or ((20, 3, 8) if packed else (2, 3, 20, 8))
    t = g.tensor("x", shape, dtype="bf16")
    how: dict[str, Any] = {"block_len": 8, "stride": 4, **options}
    if weights is not None:
        how["weights"] = g.tensor("weights", weights, dtype=weights_dtype)
    if packed:
        how["cu_seqlens"] = g.tensor("cu_seqlens", (3,), dtype="int32")
    if backward:
        grad = g.tensor("grad", d or ((5, 3, 8) if packed else (2, 3, 4, 8)), dtype=d_dtype)
        for y in g.nsa_compress_backward(t, grad, grads=grads, **how):
            if y is not None:
                g.output(y)
    else:
        g.output(g.nsa_compress(t, **how))
    return g


def choice(*, shape=(2, 3, 20, 3), dtype="fp32", **options):
    g = Graph("case")
    t = g.tensor("importance", shape, dtype=dtype)
    g.output(g.nsa_topk(t, **{"seqlen_kv": 24, "block_size": 8, "n_blocks": 4, **options}))
    return g


# rule, a graph that breaks it, the nearest one that keeps it
CASES: list[tuple[str, Any, Any]] = [
    ("nsa_flags", lambda: selection(backward=True, deterministic=1), lambda: selection(backward=True, deterministic=True)),
    ("nsa_scale", lambda: selection(scale=math.inf), lambda: selection(scale=-0.5)),
    ("nsa_sizes", lambda: selection(block_size=0), lambda: selection(block_size=1)),
    ("nsa_sizes", lambda: selection(block_size=8.0), lambda: selection(block_size=7)),
    ("nsa_sizes", lambda: choice(n_local=-1), lambda: choice(n_local=0)),
    ("nsa_overlap", lambda: pooling(block_len=2), lambda: pooling(block_len=4)),
    ("nsa_forced", lambda: choice(n_init=3, n_local=2), lambda: choice(n_init=2, n_local=2)),
    ("nsa_grads", lambda: selection(backward=True, grads=("q", "b")), lambda: selection(backward=True, grads=("q",))),
    ("nsa_nothing_asked", lambda: selection(backward=True, grads=()), lambda: selection(backward=True, grads=("v",))),
    ("nsa_lse", lambda: selection(backward=True, without=["lse"]), lambda: selection(backward=True)),
    ("nsa_rank", lambda: selection(shapes={"block_indices": (2, 3, 20)}), selection),
    ("nsa_rank", lambda: selection(packed=True, shapes={"q": (1, 20, 6, 8)}), lambda: selection(packed=True)),
    ("nsa_some_offset", lambda: selection(packed=True, shapes={"cu_seqlens": (0,)}),
     lambda: selection(packed=True, shapes={"cu_seqlens": (1,)})),
    ("nsa_batch", lambda: selection(shapes={"k": (1, 3, 24, 8)}), selection),
    ("nsa_head_dim", lambda: selection(shapes={"k": (2, 3, 24, 9)}), selection),
    ("nsa_kv_rows", lambda: selection(shapes={"v": (2, 3, 23, 16)}), selection),
    ("nsa_kv_heads", lambda: selection(shapes={"block_indices": (2, 6, 20, 4)}), selection),
    ("nsa_query_heads", lambda: selection(backward=True, shapes={"lse": (2, 3, 20)}), lambda: selection(backward=True)),
    ("nsa_query_rows", lambda: selection(shapes={"block_indices": (2, 3, 24, 4)}), selection),
    ("nsa_head_dim_v", lambda: selection(backward=True, shapes={"do": (2, 6, 20, 8)}), lambda: selection(backward=True)),
    ("nsa_compress_batch", lambda: pooling(backward=True, d=(1, 3, 4, 8)), lambda: pooling(backward=True)),
    ("nsa_compress_heads", lambda: pooling(backward=True, d=(2, 1, 4, 8)), lambda: pooling(backward=True)),
    ("nsa_positive", lambda: pooling(x=(2, 0, 20, 8)), lambda: pooling(x=(2, 1, 20, 8))),
    ("nsa_slots", lambda: selection(shapes={"block_indices": (2, 3, 20, sym("S", 4))}),
     lambda: selection(shapes={"block_indices": (2, 3, 20, 0)})),
    ("nsa_groups", lambda: selection(shapes={"q": (2, 7, 20, 8)}), lambda: selection(shapes={"q": (2, 9, 20, 8)})),
    ("nsa_packed_rows", lambda: selection(packed=True, shapes={"k": (21, 3, 8), "v": (21, 3, 16)}),
     lambda: selection(packed=True)),
    ("nsa_number_of_tokens", lambda: pooling(x=(2, 3, sym("T", 20), 8)), pooling),
    ("nsa_compressed_rows", lambda: compressed(seqlen_kv=44), compressed),
    ("nsa_compressed_rows", lambda: pooling(backward=True, d=(2, 3, 5, 8)), lambda: pooling(backward=True)),
    ("nsa_compressed_rows", lambda: compressed(packed=True, stride=8), lambda: compressed(packed=True)),
    ("nsa_block_count", lambda: choice(block_size=16), lambda: choice(block_size=8)),
    ("nsa_weights", lambda: pooling(weights=(7, 8)), lambda: pooling(weights=(8, 8))),
    ("nsa_weights", lambda: pooling(weights=(8, 4)), lambda: pooling(weights=(8, 1))),
    ("nsa_weights", lambda: pooling(backward=True, grads=("x", "weights")),
     lambda: pooling(backward=True, grads=("x", "weights"), weights=(8, 1))),
    ("nsa_gradient_width", lambda: pooling(backward=True, weights=(8, 8, 5)),
     lambda: pooling(backward=True, weights=(8, 8, 5), d=(2, 3, 4, 5))),
    ("nsa_io_dtype", lambda: selection(dtypes={"v": "fp16"}), selection),
    ("nsa_io_dtype", lambda: pooling(backward=True, d_dtype="fp32"), lambda: pooling(backward=True)),
    ("nsa_stats_dtype", lambda: selection(backward=True, dtypes={"lse": "bf16"}), lambda: selection(backward=True)),
    ("nsa_index_dtype", lambda: selection(dtypes={"block_indices": "fp32"}), lambda: selection(dtypes={"block_indices": "int64"})),
    ("nsa_index_dtype", lambda: selection(give=["block_counts"], dtypes={"block_counts": "uint8"}),
     lambda: selection(give=["block_counts"])),
    ("nsa_weights_dtype", lambda: pooling(weights=(8, 1), weights_dtype="fp16"),
     lambda: pooling(weights=(8, 1), weights_dtype="fp32")),
    ("nsa_importance_dtype", lambda: choice(dtype="bf16"), lambda: choice(dtype="fp64")),
]


@pytest.mark.parametrize("rule, bad, good", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_rule(rule: str, bad: Any, good: Any) -> None:
    assert rule in {v.rule for v in violations(bad())}
    with pytest.raises(GraphError, match="given .*, expected "):
        validate(bad())
    assert not violations(good())


def test_every_rule_has_a_case() -> None:
    names = [r.name for r in NSA_RULES]
    assert len(names) == len(set(names)) and set(names) == {rule for rule, _, _ in CASES}


@pytest.mark.parametrize("options", [{"scale": math.nan}, {"block_size": -1}, {"shapes": {"v": (2, 3, 23, 16)}},
                                     {"dtypes": {"block_indices": "bool"}}], ids=str)
def test_backward_refuses_what_forward_refuses(options: dict[str, Any]) -> None:
    """cudnn-frontend PR#901: one validator for both directions, in the same words."""
    said = [{(v.rule, v.what, v.given, v.expected) for v in violations(selection(**options, backward=b))}
            for b in (False, True)]
    assert said[0] and said[0] <= said[1]


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'block_size'"):
        selection(block_sizes=8)


# ---- records ---------------------------------------------------------------------------------------------------

GRAPHS = {
    "selection": selection, "selection with counts": lambda: selection(give=["block_counts"]),
    "selection packed": lambda: selection(packed=True), "backward": lambda: selection(backward=True, deterministic=True),
    "backward with dlse": lambda: selection(backward=True, give=["dlse"], grads=("k",)),
    "compressed": compressed, "compressed packed": lambda: compressed(packed=True),
    "compressed backward": lambda: compressed(backward=True),
    "pooling": pooling, "pooling with a map": lambda: pooling(weights=(8, 8, 5)),
    "pooling packed": lambda: pooling(packed=True),
    "pooling backward": lambda: pooling(backward=True, weights=(8, 8), grads=("x", "weights")), "choice": choice,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_and_records_survive_the_wire(name: str) -> None:
    g = GRAPHS[name]()
    assert Graph.from_bytes(g.to_bytes()).same_as(g)
    desc = fuse(g).steps[0].desc
    assert op_from_wire(unpack(pack(op_to_wire(desc)))) == desc and type(desc) in NSA_TYPES.values()


def test_every_op_has_a_graph_here() -> None:
    assert {fuse(g()).steps[0].desc.op for g in GRAPHS.values()} == set(NSA_OPS)


def key(g: Graph) -> tuple:
    validate(g)
    return plan_key(fuse(g), Target.cuda((9, 0)), Policy(gates="off"))


def packed_selection(tokens: int, backward: bool) -> Graph:
    def shape(s: tuple[int, ...]) -> tuple[int, ...]:
        return (tokens, *s[1:]) if s[0] == 20 else s

    return selection(packed=True, backward=backward, shapes={n: shape(s) for n, s in PACKED.items()})


@pytest.mark.parametrize("backward", [False, True])
def test_packed_totals_do_not_re_key(backward: bool) -> None:
    assert key(packed_selection(4001, backward)) == key(packed_selection(5003, backward))


def test_what_re_keys_a_selection() -> None:
    keys = {key(selection()), key(selection(block_size=4)), key(selection(dtypes={"block_indices": "int64"})),
            key(selection(give=["block_counts"])), key(selection(shapes={"block_indices": (2, 3, 20, 5)})),
            key(selection(backward=True)), key(selection(backward=True, deterministic=True))}
    assert len(keys) == 7
    assert key(selection(scale=2.0)) == key(selection())


# ---- backward graphs -------------------------------------------------------------------------------------------


def test_every_differentiable_op_has_a_rule() -> None:
    assert set(DERIVATIVES) == {op for op in NSA_OPS if not op.endswith("_backward")}


@pytest.mark.parametrize("outputs", ["o", "o and lse", "lse"])
def test_the_backward_graph_of_a_selection_is_autograd(outputs: str) -> None:
    g = Graph("forward")
    t = {n: g.tensor(n, s, dtype="fp64") for n, s in (("q", (1, 4, 20, 8)), ("k", (1, 2, 20, 8)), ("v", (1, 2, 20, 6)))}
    i = g.tensor("i", (1, 2, 20, 3), dtype="int32")
    o, lse = g.nsa_selection(t["q"], t["k"], t["v"], i, block_size=8, stats=True)
    if "o" in outputs.split():
        g.output(o, name="o")
    if "lse" in outputs:
        g.output(lse, name="lse")
    gen = torch.Generator().manual_seed(0)
    x = {n: torch.randn(h.shape, generator=gen, dtype=torch.float64, requires_grad=True) for n, h in t.items()}
    entries = torch.randint(0, 3, (1, 2, 20, 3), generator=gen, dtype=torch.int32)
    entries[..., 0] = torch.arange(20) // 8
    want = dict(zip(("o", "lse"), selection_forward_reference(*x.values(), entries, 8, return_lse=True)))
    grads = {n: torch.randn(y.shape, generator=gen, dtype=torch.float64) for n, y in want.items() if n in outputs.split()}
    expected = torch.autograd.grad([want[n] for n in grads], list(x.values()), list(grads.values()),
                                   materialize_grads=True)
    plan = backward_graph(g, wrt=["q", "k", "v"]).compile("cpu", engines=["reference"])
    feeds = {**{n: y.detach() for n, y in (*x.items(), *want.items())}, "i": entries,
             **{f"d_{n}": y for n, y in grads.items()}}
    got = plan.execute({n: feeds[n] for n in plan.program.inputs})
    for name, ref in zip("qkv", expected):
        assert torch.allclose(got[f"d_{name}"], ref, atol=1e-12)


def test_the_backward_graph_of_the_whole_family() -> None:
    """Pooling, compressed attention, choice, selection and gates in one graph: the choice passes no gradient."""
    b, h, t, d, kw = 1, 2, 24, 4, {"block_len": 4, "stride": 2}
    g = Graph("family")
    q, k, v = (g.tensor(n, (b, 2 * h if n == "q" else h, t, d), dtype="fp64") for n in "qkv")
    gates = [g.tensor(f"g{i}", (b, 2 * h, t), dtype="fp64") for i in range(2)]
    k_cmp, v_cmp = g.nsa_compress(k, **kw), g.nsa_compress(v, **kw)
    o_cmp, _, importance = g.nsa_compressed_attention(q, k_cmp, v_cmp, seqlen_kv=t, block_size=8, importance=True, **kw)
    indices = g.nsa_topk(importance, seqlen_kv=t, block_size=8, n_blocks=3)
    o_slc, _ = g.nsa_selection(q, k, v, indices, block_size=8)
    g.output(g.nsa_gated_sum([o_cmp, o_slc], gates), name="y")
    plan = g.compile("cpu", engines=["reference"])
    gen = torch.Generator().manual_seed(0)
    x = {n: torch.randn(plan.program.slots[i].desc.shape, generator=gen, dtype=torch.float64)
         for n, i in plan.program.inputs.items()}
    dy = torch.randn(b, 2 * h, t, d, generator=gen, dtype=torch.float64)
    back = backward_graph(g, wrt=list(x)).compile("cpu", engines=["reference"])
    feeds = {**x, "d_y": dy}
    got = back.execute({n: feeds[n] for n in back.program.inputs})
    for name in x:
        step = torch.zeros_like(x[name])
        step.view(-1)[::7] = 1e-6
        ends = [(plan.execute({**x, name: x[name] + s * step})["y"] * dy).sum() for s in (1, -1)]
        assert abs((ends[0] - ends[1]) / 2e-6 - (got[f"d_{name}"] * step).sum() / 1e-6) < 1e-4, name


# ---- values ----------------------------------------------------------------------------------------------------


def operands(packed: bool = False) -> dict[str, torch.Tensor]:
    table = PACKED if packed else DENSE
    x = {n: torch.randn(table[n]) for n in "qkv"}
    x["block_indices"] = torch.zeros(table["block_indices"], dtype=torch.int32)
    x["block_counts"] = torch.full(table["block_counts"], 4, dtype=torch.int32)
    if packed:
        x["cu_seqlens"] = torch.tensor([0, 9, 9, 20], dtype=torch.int32)
    return x


def test_the_first_bad_index_is_reported_where_it_was_asked_for() -> None:
    plan = selection(give=["block_counts"], io="fp32").compile("cpu")
    x = operands()
    x["block_indices"][1, 2, 5, 3] = 3  # 24 keys of blocks of 8: 0..2
    x["block_indices"][0, 0, 0, 1] = -1  # the padding that nsa_topk leaves
    plan.execute(x)
    with debug(check_values=True), pytest.raises(BindError, match=r"block_indices\[1, 2, 5, 3\]: given 3, expected -1 .* 0..2"):
        plan.execute(x)
    x["block_counts"][1, 2, 5] = 3  # past the count: not looked at
    with debug(check_values=True):
        plan.execute(x)
        x["block_indices"][0, 1, 0, 0] = -2
        with pytest.raises(BindError, match=r"block_indices\[0, 1, 0, 0\]: given -2"):
            plan.execute(x)


def test_packed_block_numbers_are_checked_against_the_rows_own_sequence() -> None:
    plan = selection(packed=True, give=["block_counts"], io="fp32").compile("cpu")
    x = operands(packed=True)
    x["block_indices"][8, 0, 0] = 2  # the first sequence has 9 tokens: blocks 0 and 1
    x["block_indices"][9, 0, 0] = 1
    with debug(check_values=True), pytest.raises(BindError, match=r"block_indices\[8, 0, 0\]: given 2, .* 0..1"):
        plan.execute(x)


@pytest.mark.parametrize("name, at, value, says", [
    ("block_counts", (0, 1, 7), 5, r"block_counts\[0, 1, 7\]: given 5, expected a value in 0..4"),
    ("block_counts", (1, 0, 0), -1, r"block_counts\[1, 0, 0\]: given -1"),
])
def test_counts_out_of_range_are_errors_where_reading_is_free(name: str, at: Any, value: int, says: str) -> None:
    plan = selection(give=["block_counts"], io="fp32").compile("cpu")
    x = operands()
    x[name][at] = value
    with pytest.raises(BindError, match=says):
        plan.execute(x)


def test_bad_offsets_are_errors_where_reading_is_free() -> None:
    plan = selection(packed=True, give=["block_counts"], io="fp32").compile("cpu")
    x = operands(packed=True)
    x["cu_seqlens"][2] = 30
    with pytest.raises(BindError, match=r"cu_seqlens\[2\]: given 30"):
        plan.execute(x)


def test_a_wrong_buffer_is_a_bind_error() -> None:
    plan = selection(io="fp32").compile("cpu")
    x = {n: t for n, t in operands().items() if n != "block_counts"}
    for name, bad in (("block_indices", x["block_indices"].long()), ("block_indices", x["block_indices"][..., :3]),
                      ("q", x["q"].double())):
        with pytest.raises(BindError, match=name):
            plan.execute({**x, name: bad})
