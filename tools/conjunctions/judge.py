"""One case on one engine: compile, execute into NaN-filled results, compare, and look for what should not have been touched."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engines import registry
from engines.reference.plain import allowed_error
from frost.errors import NotSupportedError

from .arena import Arena
from .axes import MAY_DECLINE
from .buffers import Prepared
from .suite import compare
from .yardstick import ORDERS, largest_error

# Runs of a deterministic backward that have to be equal bit for bit. On a CPU nothing runs side by side, and the
# interpreter is slow.
REPEATS = {"cpu": 1, "cuda": 3}
# A result past this many times what is allowed is wrong, however lucky the yardstick was.
MOST_REORDERED = 8
PASSED, DECLINED, FAILED, ERROR, CRASHED = "passed", "declined", "failed", "error", "crashed"


@dataclass(frozen=True)
class Verdict:
    """How one op of a case went. `shares`: of the allowed error, by result. `fields`: what an engine declined with.
    `reordered`: results that passed by the yardstick of several orders of summation only."""

    op: str
    verdict: str
    detail: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    reordered: tuple[str, ...] = ()
    seconds: float = 0.0
    compile_s: float = 0.0
    label: str = ""  # the engine as the route shows it

    @property
    def bad(self) -> bool:
        return self.verdict not in (PASSED, DECLINED)


def ensure_registered(engine: str) -> None:
    """Raises ValueError for an unknown engine. One that ships but is not in the table yet is registered for this process."""
    if engine == "sm80" and engine not in registry.names():
        from engines.sm80 import ENGINE

        registry.register(ENGINE, priority=25)
    registry.get(engine)


def judge(made: Prepared, op: str, engine: str, device: torch.device) -> Verdict:
    """Nothing but an interrupt is raised: what goes wrong is in the verdict."""
    start = time.monotonic()
    try:
        verdict = _run(made, op, engine, device)
    except NotSupportedError as e:
        verdict = _declined(made, op, engine, device, e.reasons.get(engine, []))
    except Exception as e:
        verdict = Verdict(op, ERROR, f"{type(e).__name__}: {e}")
    return replace(verdict, seconds=time.monotonic() - start)


def _run(made: Prepared, op: str, engine: str, device: torch.device) -> Verdict:
    graph, buffers = made.build_graph(op)
    start = time.monotonic()
    plan = graph.compile(device, engines=[engine], gates="off")
    compile_s = time.monotonic() - start
    if plan.routes[0].engine_name != engine:
        return Verdict(op, FAILED, f"routed to {plan.routes[0].engine}, expected {engine}")
    arena = Arena(buffers, device)
    tensors = arena.upload()
    results = plan.execute(tensors)
    faults = [f"{n}: the buffer that was given was not used" for n, t in results.items() if t is not tensors[n]]
    fetched = arena.fetch()
    faults += arena.faults(fetched, made.outputs)
    if made.case.deterministic and op.endswith("_backward"):
        for _ in range(REPEATS[device.type] - 1):
            plan.execute(arena.upload())
            if not torch.equal(arena.fetch(), fetched):
                faults.append("deterministic: not bit-equal from run to run")
                break
    first = arena.results(fetched, list(results))
    shares, wrong = _shares(made, first, made.plain)
    reordered: tuple[str, ...] = ()
    near = tuple(n for n in wrong if _is_near(made, n, first[n]))
    if near:
        more, still = _shares(made, {n: first[n] for n in near}, _worst_yardstick(made, near))
        shares, reordered = {**shares, **more}, tuple(more)
        wrong = {n: text for n, text in wrong.items() if n not in more} | still
    faults += wrong.values()
    return Verdict(op, FAILED if faults else PASSED, "\n".join(faults), shares, reordered=reordered, compile_s=compile_s,
                   label=plan.routes[0].engine)


def _is_near(made: Prepared, name: str, got: Tensor) -> bool:
    """Whether a result exceeds what is allowed by so little that a lucky yardstick may be the reason."""
    ref, plain = made.ref[name].double(), made.plain[name]
    error = (got.double() - ref).abs()
    known = torch.isfinite(ref)
    if got.shape != ref.shape or not torch.isfinite(error[known]).all():
        return False
    allowed = allowed_error(name, ref, plain, made.ref["lse"]).expand(ref.shape)
    return bool((error[known] <= MOST_REORDERED * allowed[known]).all())


def _shares(made: Prepared, results: Mapping[str, Tensor], plain: Mapping[str, Tensor]
            ) -> tuple[dict[str, float], dict[str, str]]:
    """(share of the allowed error, or what is wrong) by result."""
    shares, wrong = {}, {}
    for name, got in results.items():
        try:
            shares[name] = compare.assert_close_to_oracle(
                got, made.ref[name], plain[name], lse=made.ref["lse"], name=name)
        except AssertionError as e:
            wrong[name] = str(e)
    return shares, wrong


def _worst_yardstick(made: Prepared, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The plain composition's results from the order of summation in which it errs most, by result."""
    measured = [made.plain, *map(made.again, range(ORDERS))]
    return {name: max(measured, key=lambda found: largest_error(found, name, made.ref[name]))[name] for name in names}


def _declined(made: Prepared, op: str, engine: str, device: torch.device, reasons: list[str]) -> Verdict:
    """A decline needs reasons, and an engine may not decline what it says it serves."""
    if not reasons:
        return Verdict(op, FAILED, "declined without a reason")
    # Beside an engine that serves everything the decline is on record field by field.
    graph, _ = made.build_graph(op)
    route = graph.compile(device, engines=[engine, "reference"], gates="off").routes[0]
    fields = tuple(sorted({re.sub(r"\[\d+\]", "[i]", _OPERAND.sub("operand.", d.field)) for d in route.declined}))
    allowed = MAY_DECLINE.get(engine)
    if allowed is not None and not all(any(f.endswith(x) for x in allowed) for f in fields):
        return Verdict(op, FAILED, "declined what it says it serves: " + "; ".join(reasons), fields=fields)
    return Verdict(op, DECLINED, "; ".join(reasons), fields=fields)


_OPERAND = re.compile(r"^(q|k|v|o|do|dq|dk|dv)\.")
