"""Validation: every rule of every table over a graph, all violations in one error, before any engine is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from frost.errors import GraphError
from frost.graph import Graph
from frost.rules import Rule
from frost.rules.attention import ATTENTION_RULES
from frost.rules.nsa import NSA_RULES
from frost.rules.primitives import PRIMITIVE_RULES
from frost.rules.structure import STRUCTURE_RULES

RULES: tuple[Rule, ...] = (*STRUCTURE_RULES, *ATTENTION_RULES, *PRIMITIVE_RULES)
# So many are listed: every node of a large graph can break every rule, and nobody reads on after this.
MOST = 1_000


@dataclass(frozen=True)
class Violation:
    """`rule` broken at `where` (a node or the graph) by `what` (a tensor or an option)."""

    rule: str
    where: str
    what: str
    given: str
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}: given {self.given}, expected {self.expected}"
        return f"{text}; {self.hint}" if self.hint else text


def violations(graph: Graph) -> list[Violation]:
    """Everything that is wrong with a graph."""
    return list(_violations(graph))


def _violations(graph: Graph) -> Iterator[Violation]:
    subjects: list[tuple[str | None, str, object]] = [(None, f"graph {graph.name!r}", graph)]
    subjects += [(node.op, f"{node.op} (node {node.name!r})", node) for node in graph.ops]
    rules = (*RULES, *NSA_RULES)
    for op, where, subject in subjects:
        for rule in rules:
            if (rule.ops is None) == (op is None) and (rule.ops is None or op in rule.ops):
                for bad in rule.check(subject):
                    yield Violation(rule.name, where, bad.what, str(bad.given), str(bad.expected), rule.hint)


def validate(graph: Graph) -> None:
    """Return for a graph that means something; otherwise raise GraphError with one line per violation (the first
    `MOST` of them)."""
    found = [str(v) for v in islice(_violations(graph), MOST + 1)]
    if len(found) > MOST:
        found[-1] = f"graph {graph.name!r}: and more: the first {MOST} violations are listed"
    if found:
        raise GraphError("\n".join(found), found)
