"""The plan key: host scalars and strings known at plan time, nested in tuples.

In: every descriptor field that changes code or sizes, graph structure, engine order and policy, target arch, source
digests, toolchain versions, and which gates hold. Out: names, pointers, streams, packed totals and counts, run-time
values. Symbols go in by order of first appearance and their bound, so renaming one re-keys nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any

from engines import registry
from engines.base import Target

from . import gates
from .lowering import Policy
from .program import Program

SCHEMA = 1


def plan_key(program: Program, target: Target, policy: Policy) -> tuple:
    """The key of a program compiled for a target under a policy."""
    steps = tuple((s.desc.key(), s.inputs, s.outputs) for s in program.steps)
    kinds = tuple(slot.kind for slot in program.slots)
    ops = sorted({s.desc.op for s in program.steps})
    engines = []
    for engine in policy.candidates():
        gated = engine.needs_gate(target) and policy.gates != "off" and engine.unavailable(target) is None
        held = tuple(gates.holds(engine.name, op, target) for op in ops) if gated else ()
        engines.append((engine.name, registry.registrations(engine.name), engine.source_digest(),
                        tuple(sorted(engine.toolchain().items())), held))
    default_order = policy.engines is None
    return (SCHEMA, target.arch, default_order, policy.gates, tuple(engines), kinds, _rename_symbols(steps))


def key_text(key: tuple) -> str:
    """A short stable name for a key."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _rename_symbols(tree: Any) -> Any:
    order: dict[str, int] = {}

    def walk(node: Any) -> Any:
        if not isinstance(node, tuple):
            return node
        if len(node) == 3 and node[0] == "sym":
            return ("sym", order.setdefault(node[1], len(order)), node[2])
        return tuple(walk(n) for n in node)

    return walk(tree)
