"""Lowering among engines of all characters: who is asked, who serves, and what is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.small import Spec

from descriptors import DType
from engines import registry
from engines.base import (
    Adapter,
    BoundCall,
    Capabilities,
    Decline,
    Engine,
    Executable,
    Launch,
    Reason,
    SdpaFwdDsl,
    Support,
    Target,
    Workspace,
)
from frost import gates, routing
from frost.errors import NotSupportedError
from frost.lowering import Policy

FLOATS = (DType.F16, DType.BF16, DType.F32)
ALL_OPTIONS = frozenset(
    {
        "lse",
        "bias",
        "mask",
        "sink",
        "softcap",
        "causal",
        "window_left",
        "window_right",
        "align",
        "seq_len_q",
        "seq_len_kv",
        "cu_seqlens_q",
        "cu_seqlens_kv",
    }
)
Register = Callable[..., Engine]


class Fill(Executable):
    """Writes a constant into o, so that a test sees who ran."""

    def __init__(self, value: float) -> None:
        self.value = value

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        out = launch.operands["o"]

        def call(stream: int) -> None:
            out.fill_(self.value)

        return call


class Fake(Engine):
    """A forward cell with a capability row, which can be told to misbehave."""

    def __init__(
        self,
        name: str,
        *,
        says_yes: bool = False,
        in_check: Exception | None = None,
        in_compile: Exception | None = None,
        unavailable: str = "",
        automatic: bool = True,
        gated: bool = False,
        **row: Any,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.gated = gated  # type: ignore[misc]
        self.asked: list[str] = []
        self._unavailable, self._automatic = unavailable, automatic
        fields: dict[str, Any] = {
            "devices": ("cpu", "cuda"),
            "dtypes": FLOATS,
            "features": frozenset({"lse"}),
            **row,
        }
        fake = self

        class Fwd(SdpaFwdDsl):
            engine = name
            capabilities = (Capabilities(name, "sdpa", **fields),)

            def check_support(self, desc: Any, target: Target) -> Support:
                fake.asked.append("check_support")
                if in_check is not None:
                    raise in_check
                return Support() if says_yes else super().check_support(desc, target)

            def compile(self, desc: Any, target: Target) -> Executable:
                fake.asked.append("compile")
                if in_compile is not None:
                    raise in_compile
                return Fill(float(len(name)))

        self._cells = (Fwd(),)

    def adapters(self) -> tuple[Adapter, ...]:
        return self._cells

    def unavailable(self, target: Target) -> Reason | None:
        return Reason("driver", "none", "a driver", self._unavailable) if self._unavailable else None

    def automatic(self, target: Target) -> bool:
        return self._automatic


def compiled(spec: Spec | None = None, **how: Any) -> Any:
    return (spec or Spec()).build().compile("cpu", **how)


def run(plan: Any) -> torch.Tensor:
    return plan.execute({n: torch.randn(*shape) for n, (shape, _) in Spec().shapes().items()})["o"]


# ---- who serves ------------------------------------------------------------------------------------------


def test_the_first_that_can_serves(register: Register) -> None:
    first, second = register(Fake("first"), priority=1), register(Fake("second"), priority=2)
    plan = compiled()
    assert plan.routes[0].engine == "first" and plan.routes[0].declined == ()
    assert bool((run(plan) == 5.0).all())
    assert second.asked == []  # type: ignore[attr-defined]
    assert first.asked == ["check_support", "compile"]  # type: ignore[attr-defined]


def test_an_engine_ranked_first_that_cannot_serve_is_not_built(register: Register) -> None:
    """cudnn-frontend PR#1061: an engine for D = 128 alone, ranked first, was launched on D = 64. Support is
    checked after ranking and before any build."""
    narrow = register(Fake("narrow", head_dim=(128, 128)), priority=1)
    plan = compiled(Spec(dims=(64, 64)))
    declined = [d for d in plan.routes[0].declined if d.engine == "narrow"]
    assert [(d.field, d.got, d.wanted) for d in declined] == [("head_dim", "64", "128..128")]
    assert narrow.asked == ["check_support"]  # type: ignore[attr-defined]
    with pytest.raises(NotSupportedError, match="head_dim: got 64, wanted 128..128"):
        compiled(Spec(dims=(64, 64)), engines=["narrow"])
    assert compiled(Spec(dims=(128, 128))).routes[0].engine == "narrow"


def test_an_option_that_is_accepted_but_not_consumed_is_a_bug_and_says_so(register: Register) -> None:
    """An option that silently does nothing is the worst kind of wrong: check_support says yes, no row has the
    feature."""
    register(Fake("careless", says_yes=True), priority=1)
    for spec, word in (
        (Spec(options={"softcap": 3.0}), "softcap"),
        (Spec(bias=(6, 8)), "bias"),
        (Spec(options={"causal": True}), "causal"),
        (Spec(options={"window": (2, None)}), "window_left"),
        (Spec(options={"causal": True, "align": "bottom_right"}), "align"),
        (Spec(sink="fp32"), "sink"),
    ):
        with pytest.raises(TypeError, match=f"careless.*{word}"):
            compiled(spec)
    assert compiled().routes[0].engine == "careless"


@pytest.mark.parametrize("where", ["in_check", "in_compile"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("x"),
        NotImplementedError("x"),
        AssertionError("x"),
        NotSupportedError("x"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_that_is_no_decline_is_a_bug_and_propagates(
    where: str, error: Exception, register: Register
) -> None:
    """Also NotSupportedError: only the typed decline moves on."""
    register(Fake("broken", **{where: error}), priority=1)
    with pytest.raises(type(error)) as caught:
        compiled()
    assert caught.value is error


def test_a_decline_while_compiling_moves_on_with_its_reason(register: Register) -> None:
    no = Decline(Reason("shared_memory", "300 KB", "227 KB"), Reason("registers", "300", "255"))
    register(Fake("greedy", in_compile=no), priority=1)
    plan = compiled()
    assert [(d.field, d.text) for d in plan.routes[0].declined if d.engine == "greedy"] == [
        ("shared_memory", "shared_memory: got 300 KB, wanted 227 KB"),
        ("registers", "registers: got 300, wanted 255"),
    ]
    assert plan.routes[0].engine_name == "torch_sdpa"


def test_an_engine_that_is_not_available_says_why(register: Register) -> None:
    """huggingface/kernels#707: a probe on an unknown arch took the process down."""
    absent = register(Fake("absent", unavailable="no driver: libfoo.so is missing"), priority=1)
    plan = compiled()
    assert [d.text for d in plan.routes[0].declined if d.engine == "absent"] == [
        "no driver: libfoo.so is missing"
    ]
    assert absent.asked == []  # type: ignore[attr-defined]


def test_an_arch_that_nobody_knows_is_declined_not_crashed_on() -> None:
    route = Spec(dtype="bf16").build().compile(Target.cuda((3, 5)), gates="off").routes[0]
    assert route.engine_name == "reference" and {d.engine for d in route.declined} >= {"triton", "torch_sdpa"}
    assert any(d.field == "arch" and d.got == "sm_35" for d in route.declined)


def test_an_engine_that_is_never_automatic_serves_when_named(register: Register) -> None:
    register(Fake("shy", automatic=False), priority=1)
    declined = [d for d in compiled().routes[0].declined if d.engine == "shy"]
    assert "engines=['shy']" in declined[0].text
    assert compiled(engines=["shy"]).routes[0].engine == "shy"


def test_interpreted_kernels_are_never_chosen_by_default() -> None:
    """The interpreter is for tests, thousands of times slower than anything else here."""
    assert compiled(engines=["triton"]).routes[0].engine.startswith("triton")
    for spec in (
        Spec(),
        Spec(op="sdpa_backward"),
        Spec(options={"softcap": 3.0}),
        Spec(packed=True, seqlens=(9, 9)),
    ):
        route = compiled(spec).routes[0]
        assert route.engine_name != "triton"
        assert any(d.engine == "triton" and "asked for by name" in d.text for d in route.declined)


# ---- explicit engines --------------------------------------------------------------------------------------


def test_named_engines_are_asked_in_the_order_given(register: Register) -> None:
    register(Fake("alpha"), priority=1)
    register(Fake("beta"), priority=2)
    assert compiled(engines=["beta", "alpha"]).routes[0].engine == "beta"
    assert compiled(engines=["reference", "alpha"]).routes[0].engine == "reference"


def test_named_engines_never_fall_back() -> None:
    """transformers PR#46960: a silent fall-back to the slow path. The reference could serve, but wasn't
    named."""
    with pytest.raises(NotSupportedError) as caught:
        compiled(Spec(options={"softcap": 3.0, "window": (4, 4)}), engines=["torch_sdpa"])
    assert set(caught.value.reasons) == {"torch_sdpa"}


def test_the_error_lists_every_engine_with_all_its_reasons(register: Register) -> None:
    register(Fake("narrow", head_dim=(128, 128), dtypes=(DType.BF16,)))
    register(Fake("absent", unavailable="no driver"))
    with pytest.raises(NotSupportedError) as caught:
        compiled(Spec(dtype="fp64", options={"softcap": 3.0}), engines=["narrow", "absent", "triton"])
    reasons, text = caught.value.reasons, str(caught.value)
    assert list(reasons) == ["narrow", "absent", "triton"]
    assert len(reasons["narrow"]) == 3 and reasons["absent"] == ["no driver"]  # dtype, head_dim, softcap
    assert all(reason in text for texts in reasons.values() for reason in texts)
    assert "way out" in text and "reference" in text and "node 'sdpa'" in text


BAD_GRAPHS: dict[str, Spec] = {
    "heads that don't divide": Spec(heads=(4, 3)),
    "a bias that doesn't broadcast": Spec(bias=(1, 3, 6, 8)),
    "causal with a right window": Spec(options={"causal": True, "window": (None, 3)}),
    "a mask of floats' shape": Spec(mask=(5, 8)),
    "statistics of another shape": Spec(op="sdpa_backward", sink="bf16"),
}


@pytest.mark.parametrize("what", BAD_GRAPHS)
def test_a_bad_graph_fails_in_the_same_words_on_every_engine(what: str) -> None:
    """pytorch#193728: whether an input was valid hung on the backend that was chosen."""
    from frost.errors import GraphError

    texts = set()
    for engines in (None, ["reference"], ["torch_sdpa"], ["triton"]):
        with pytest.raises(GraphError) as caught:
            compiled(BAD_GRAPHS[what], engines=engines, gates="off")
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_an_unknown_engine_names_the_nearest() -> None:
    for given, near in (("tritn", "triton"), ("referense", "reference"), ("torch-sdpa", "torch_sdpa")):
        with pytest.raises(ValueError, match=f"'{given}'.*did you mean '{near}'"):
            compiled(engines=[given])
    with pytest.raises(ValueError, match="expected one of"):
        compiled(engines=["xyz"])


@pytest.mark.parametrize("engines", ["triton", []])
def test_engines_that_are_no_list_of_names(engines: Any) -> None:
    with pytest.raises(ValueError, match="engines: given"):
        compiled(engines=engines)


def test_a_wrong_gate_policy() -> None:
    with pytest.raises(ValueError, match="gates.*'of'.*require"):
        compiled(gates="of")


@pytest.mark.parametrize(
    ("device", "words"), [("cuda:99", "cuda"), ("mps", "mps"), ("tpu", "tpu"), (3.5, "3.5")]
)
def test_a_device_that_is_not_there(device: Any, words: str) -> None:
    if device == "cuda:99" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    with pytest.raises(ValueError, match=words):
        Spec().build().compile(device)


# ---- gates -----------------------------------------------------------------------------------------------


def test_a_gated_engine_without_a_gate_declines_with_the_way_out(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(Fake("proven", gated=True), priority=1)
    monkeypatch.setattr(gates, "holds", lambda *a, **k: False)
    monkeypatch.setattr(
        gates,
        "gate_for_route",
        lambda engine, op, target, policy, **k: (
            policy == "off",
            "" if policy == "off" else "equivalence gate has not passed; run it",
            "off",
        ),
    )
    declined = [d for d in compiled().routes[0].declined if d.engine == "proven"]
    assert [(d.field, d.text) for d in declined] == [("gate", "equivalence gate has not passed; run it")]
    with pytest.raises(NotSupportedError, match="equivalence gate has not passed"):
        compiled(engines=["proven"])
    off = compiled(gates="off")
    assert off.routes[0].engine == "proven" and off.routes[0].gate == "off" and "gate: off" in off.explain()


def test_support_is_judged_before_the_gate(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that can't serve at all must not send the user off to run a gate."""
    register(Fake("proven", gated=True, head_dim=(128, 128)), priority=1)
    monkeypatch.setattr(gates, "holds", lambda *a, **k: False)
    declined = [d for d in compiled().routes[0].declined if d.engine == "proven"]
    assert [d.field for d in declined] == ["head_dim"]


def test_a_changed_environment_takes_effect_after_a_choice_was_cached(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn-frontend#1084: a flag that is read once, or whose old answer is served from a cache."""
    register(Fake("proven", gated=True), priority=1)
    monkeypatch.setattr(gates, "holds", lambda *a, **k: False)
    engines = []
    for policy in ("require", "off", "require"):
        monkeypatch.setenv("FROST_GATES", policy)
        engines.append(compiled().routes[0].engine_name)
    assert engines == ["torch_sdpa", "proven", "torch_sdpa"]


# ---- the record ------------------------------------------------------------------------------------------


def test_every_lowering_is_counted_and_hits_are_counted_apart(
    register: Register, fresh_routing: None
) -> None:
    register(Fake("counted"), priority=1)
    for _ in range(3):
        compiled()
    stats = routing.stats()
    assert stats["counted:sdpa"] == 1 and stats.cache_hits["counted:sdpa"] == 2


def test_routes_of_a_graph_with_several_nodes() -> None:
    from frost.graph import Graph

    g = Graph(name="gated")
    q, k, v = (g.tensor(n, (1, 2, 5, 8), dtype="fp32") for n in "qkv")
    o, _ = g.sdpa(q, k, v, name="attention")
    g.output(g.mul(o, g.sigmoid(q)), name="y")
    plan = g.compile("cpu")
    assert {(r.node, r.op): r.engine_name for r in plan.routes} == {
        ("attention", "sdpa"): "torch_sdpa",
        ("sigmoid", "sigmoid"): "reference",
        ("mul", "mul"): "reference",
    }
    assert all(r.graph == "gated" and r.target == "cpu" for r in plan.routes)


def test_names_in_a_route_are_this_graphs_also_on_a_cache_hit() -> None:
    first = compiled(Spec(graph="one", options={"name": "a"}))
    second = compiled(Spec(graph="two", options={"name": "b"}))
    assert second.cache_hit
    assert [(r.graph, r.node) for r in (*first.routes, *second.routes)] == [("one", "a"), ("two", "b")]


def test_a_name_that_is_taken_or_unknown_is_refused_by_the_registry(register: Register) -> None:
    register(Fake("taken"))
    with pytest.raises(ValueError, match="taken"):
        registry.register(Fake("taken"))
    with pytest.raises(ValueError, match="built in"):
        registry.unregister("reference")
    with pytest.raises(ValueError, match="nobody"):
        registry.unregister("nobody")


def test_an_engine_registered_anew_under_its_name_replaces_the_old_one() -> None:
    """A plan of the engine that was there before is not the new one's, though name and sources are equal."""
    from frost import cache

    keys = []
    for value in (1.0, 2.0):
        engine = Fake("again")
        engine._cells[0].compile = lambda desc, target, value=value: Fill(value)  # type: ignore[attr-defined,method-assign]
        registry.register(engine)
        plan = compiled(engines=["again"])
        registry.unregister("again")
        keys.append(plan.key)
        assert bool((run(plan) == value).all())
    assert keys[0] != keys[1]
    cache.clear()


def test_order_of_preference() -> None:
    """Triton before PyTorch's before the reference, third parties in between."""
    names = [n for n in registry.names() if n in ("triton", "torch_sdpa", "reference")]
    assert names == ["triton", "torch_sdpa", "reference"]
    registry.register(Fake("third_party"))
    try:
        assert registry.names()[-2:] == ("third_party", "reference")
    finally:
        registry.unregister("third_party")


def test_a_policy_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        Policy(("tritonn",))
    assert Policy(("triton",)).candidates() == (registry.get("triton"),)
