"""Which engines served a test suite: `pytest --frost-routing=FILE --frost-expect "triton>=0.9"`.

Writes one routing dump per run (FILE ends in .json or .msgpack), xdist workers merged;
prints the share of lowerings per engine at the end; and fails a run that is otherwise green where an
expectation isn't met. An expectation is ENGINE[:OP] >= SHARE, with >=, >, <=, < or ==, and the share as 0.9
or 90%.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from descriptors import LIMITS, WireError, pack, unpack
from engines import registry
from frost import routing
from frost.options import nearest

_NAME = "frost-routing-recorder"
_WORKER_KEY = "frost_routing"
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}
_EXPECTATION = re.compile(r"\s*([\w.-]+)(?::([\w.-]+))?\s*(>=|<=|==|>|<)\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*\Z")
_SHOWN_DECLINES = 5


@dataclass(frozen=True)
class Expectation:
    """A bound on the share of lowerings that an engine serves, of one op where `op` is given."""

    text: str
    engine: str
    op: str | None
    comparison: str
    share: float

    @staticmethod
    def parse(text: str) -> Expectation:
        """Raises ValueError for a text that is no expectation."""
        found = _EXPECTATION.match(text)
        share = float(found[4]) / (100 if found[5] else 1) if found else 2.0
        if found is None or share > 1:
            raise ValueError(f"--frost-expect: given {text!r}, expected something like 'triton>=0.9' or "
                             f"'triton:sdpa>=90%'")
        return Expectation(text.strip(), found[1], found[2], found[3], share)

    def unmet(self, stats: routing.Stats) -> str | None:
        """Why the counts don't meet it, or None. No share of an engine that doesn't exist is one that was meant."""
        shares = routing.shares(stats, self.op)
        engines = {*registry.names(), *routing.shares(stats)}
        unknown = "" if self.engine in engines else \
            f"; there is no engine {self.engine!r}{nearest(self.engine, sorted(engines))}"
        if not shares:
            return f"{self.text}: nothing was lowered{f' for {self.op}' if self.op else ''}{unknown}"
        got = shares.get(self.engine, 0.0)
        if _COMPARE[self.comparison](got, self.share) and not unknown:
            return None
        return f"{self.text}: the share is {got:.3f}{unknown}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("frost", "FROST routing")
    group.addoption("--frost-routing", metavar="FILE", default=None,
                    help="write which engine served every lowering of this run to FILE (.json or .msgpack)")
    group.addoption("--frost-expect", metavar="EXPECTATION", action="append", default=[],
                    help="fail the run unless an engine's share of lowerings meets this, e.g. 'triton>=0.9' "
                         "or 'triton:sdpa>=90%%'; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    path, texts = config.getoption("--frost-routing"), config.getoption("--frost-expect")
    if not (path or texts) or config.pluginmanager.has_plugin(_NAME):
        return
    try:
        expectations = [Expectation.parse(t) for t in texts]
        if path:
            routing.checked_path(path)
    except ValueError as e:
        raise pytest.UsageError(str(e)) from e
    config.pluginmanager.register(Recorder(config, path, expectations), _NAME)


class Recorder:
    """Watches one run. A worker hands its counts to the controller, which writes, prints and judges."""

    def __init__(self, config: pytest.Config, path: str | None, expectations: list[Expectation]) -> None:
        self.config, self.path, self.expectations = config, path, expectations
        self.log = routing.RoutingLog()
        self.parts: list[routing.Dump] = []
        self.lost: list[str] = []
        self.unmet: list[str] = []
        self.merged: routing.Dump | None = None
        routing.attach(self.log)

    @property
    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    def pytest_unconfigure(self) -> None:
        routing.detach(self.log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """An xdist worker ended."""
        try:
            data = node.workeroutput[_WORKER_KEY]
            self.parts.append(routing.Dump.from_wire(unpack(data, LIMITS["routing dump"], what="routing of a worker")))
        except (AttributeError, KeyError):
            self.lost.append(str(getattr(getattr(node, "gateway", None), "id", node)))
        except (WireError, routing.RoutingError) as e:
            self.lost.append(f"{node}: {e}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        own = routing.snapshot(log=self.log)
        if self.is_worker:
            self.config.workeroutput[_WORKER_KEY] = pack(own.to_wire())  # type: ignore[attr-defined]
            return
        self.merged = routing.merge_dumps([own, *self.parts])
        self.merged.suite = " ".join(self.config.args)
        if self.path:
            routing.write_dump(self.path, self.merged)
        self.unmet = [why for e in self.expectations if (why := e.unmet(self.merged.stats)) is not None]
        if self.unmet and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.merged is None:
            return
        stats = self.merged.stats
        say = terminalreporter.write_line
        terminalreporter.section("FROST routing")
        if not stats:
            say("nothing was lowered")
        for engine, share in routing.shares(stats).items():
            ops = ", ".join(f"{key.partition(':')[2]} {n}" for key, n in sorted(stats.items())
                            if key.partition(":")[0] == engine)
            say(f"{engine:<16} {share:6.1%}  {ops}")
        hits = sum(stats.cache_hits.values())
        say(f"{stats.lowerings} lowerings, {hits} steps from the plan cache")
        declines = [(n, key, name) for key, fields in stats.declines.items() for name, n in fields.items()]
        for n, key, name in sorted(declines, key=lambda d: (-d[0], d[1:]))[:_SHOWN_DECLINES]:
            say(f"declined {n} x {key}, {name}: {stats.texts.get(key, {}).get(name, '')}")
        for worker in self.lost:
            say(f"no counts from worker {worker}", red=True)
        if self.path:
            say(f"written to {self.path}")
        for why in self.unmet:
            say(f"expectation not met: {why}", red=True)
