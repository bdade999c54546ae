"""Lowering: one walk over the engines for every op and direction, with a written reason for every "no".

For each engine, in order: may it be chosen here -> capability rows and `check_support`, on descriptors alone -> every
field that is set is consumed -> gate -> `compile`. The first that passes serves. Only a typed `Decline` moves on to the
next engine; any other exception is a bug and propagates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines import registry
from engines.base import (
    API_TYPES,
    Adapter,
    Decline,
    Engine,
    Executable,
    Reason,
    SdpaBwdDsl,
    SdpaFwdDsl,
    Target,
)

from . import gates
from .errors import NotSupportedError
from .program import Step
from .routing import Declined, Route

GATE_POLICIES = ("require", "auto", "off")


@dataclass(frozen=True)
class Policy:
    """What the caller allows. `engines`: None = the registry's order; else these only, in this order."""

    engines: tuple[str, ...] | None = None
    gates: str = "require"

    def __post_init__(self) -> None:
        if self.gates not in GATE_POLICIES:
            raise ValueError(f"gates: given {self.gates!r}, expected one of {GATE_POLICIES}")
        for name in self.engines or ():
            registry.get(name)
        if self.engines is not None and not self.engines:
            raise ValueError("engines: given an empty list, expected at least one name, or None for the default order")

    def candidates(self) -> tuple[Engine, ...]:
        """The engines to ask, in order. Raises ValueError for an unknown name."""
        return registry.engines() if self.engines is None else tuple(map(registry.get, self.engines))


@dataclass(frozen=True)
class Lowered:
    """A step that found its engine."""

    adapter: Adapter
    executable: Executable
    route: Route


def lower_dsl(node: Step, api_type: type[Adapter], target: Target, policy: Policy, *, graph: str = "graph") -> Lowered:
    """Route one node. `api_type` is the adapter class of the op; each engine's cell for it is asked in turn.

    Raises NotSupportedError with every engine's reasons when none serves.
    """
    declined: list[Declined] = []
    for engine in policy.candidates():
        try:
            adapter, stamp = _admit(engine, node, api_type, target, policy)
            executable = adapter.compile(node.desc, target)
        except Decline as no:
            declined += [Declined(engine.name, r.field, r.got, r.wanted, str(r)) for r in no.reasons]
            continue
        route = Route(graph=graph, node=node.name, op=node.desc.op, engine=adapter.label(node.desc, target),
                      declined=tuple(declined), target=str(target), cache_hit=False, gate=stamp)
        return Lowered(adapter, executable, route)
    raise _nobody(node, target, declined, graph)


def lower_dsl_fwd(node: Step, target: Target, policy: Policy, *, graph: str = "graph") -> Lowered:
    """`lower_dsl` for an attention forward."""
    return lower_dsl(node, SdpaFwdDsl, target, policy, graph=graph)


def lower_dsl_bwd(node: Step, target: Target, policy: Policy, *, graph: str = "graph") -> Lowered:
    """`lower_dsl` for an attention backward."""
    return lower_dsl(node, SdpaBwdDsl, target, policy, graph=graph)


_NAMED = {SdpaFwdDsl: lower_dsl_fwd, SdpaBwdDsl: lower_dsl_bwd}


def lower_step(node: Step, target: Target, policy: Policy, *, graph: str = "graph") -> Lowered:
    """Route any step by the type of its descriptor."""
    api_type = API_TYPES[type(node.desc)]
    named = _NAMED.get(api_type)
    if named is not None:
        return named(node, target, policy, graph=graph)
    return lower_dsl(node, api_type, target, policy, graph=graph)


def _admit(engine: Engine, node: Step, api_type: type[Adapter], target: Target, policy: Policy) -> tuple[Adapter, str]:
    """The engine's cell and its gate stamp, or Decline with all the reasons that can be told without compiling."""
    adapter = engine.adapter(api_type)
    if adapter is None:
        raise Decline(Reason("op", node.desc.op, "an op of this engine", f"{engine.name} has no {node.desc.op}"))
    missing = engine.unavailable(target)
    if missing is not None:
        raise Decline(missing)
    if policy.engines is None and not engine.automatic(target):
        raise Decline(Reason("engines", "None", f"engines=[{engine.name!r}]",
                             f"{engine.name} on {target} must be asked for by name: engines=[{engine.name!r}]"))
    support = adapter.check_support(node.desc, target)
    if not support.ok:
        raise Decline(*support.reasons)
    ignored = node.desc.set_fields() - frozenset().union(*(row.features for row in adapter.capabilities))
    if ignored:
        raise TypeError(f"engine {engine.name}: accepts {node.desc.op} with {sorted(ignored)} set, but declares no "
                        f"feature that consumes it; this is a bug of the engine")
    if not engine.needs_gate(target):
        return adapter, "not needed"
    ok, reason, stamp = gates.gate_for_route(engine.name, node.desc.op, target, policy.gates,
                                             automatic=policy.engines is None)
    if not ok:
        raise Decline(Reason("gate", "none that covers this", "a valid equivalence gate", reason))
    return adapter, stamp


def _nobody(node: Step, target: Target, declined: list[Declined], graph: str) -> NotSupportedError:
    reasons: dict[str, list[str]] = {}
    for d in declined:
        reasons.setdefault(d.engine, []).append(d.text)
    lines = [f"graph {graph!r}, node {node.name!r}: no engine serves {node.desc.op} on {target}"]
    lines += [f"  {engine}: {text}" for engine, texts in reasons.items() for text in texts]
    lines.append(f"  way out: {_way_out(node, reasons)}")
    return NotSupportedError("\n".join(lines), reasons)


def _way_out(node: Step, asked: dict[str, list[str]]) -> str:
    others: Iterator[str] = (e.name for e in registry.engines() if e.name not in asked and e.adapter(
        API_TYPES[type(node.desc)]) is not None)
    names = list(others)
    return f"add one of {names} to engines=[…]" if names else "change what is named above"
