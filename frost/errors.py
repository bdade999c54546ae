"""The typed errors of FROST. Every one names the tensor or field, what was given, what was expected, and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from descriptors import FrostError
from engines.cuda_driver import DriverError


class GraphError(FrostError, ValueError):
    """A graph that means nothing: all violations in one message. `violations` holds them one by one."""

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations) or (message,)


class NotSupportedError(FrostError, RuntimeError):
    """No engine that was asked can serve a node. `reasons`: {engine: [reason, …]}."""

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.reasons = {engine: list(texts) for engine, texts in (reasons or {}).items()}


class BindError(FrostError, ValueError):
    """A buffer that does not match its descriptor; nothing was launched and nothing written."""


class PlanError(FrostError, ValueError):
    """A saved plan that does not fit this machine, these versions or this source, or whose bytes are damaged."""


class GateError(FrostError, RuntimeError):
    """An equivalence gate that is missing, stale or damaged where one is required."""


__all__ = ["BindError", "DriverError", "FrostError", "GateError", "GraphError", "NotSupportedError", "PlanError"]
