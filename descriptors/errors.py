"""The root of FROST's typed errors, and the one for bytes that cannot be read."""

from __future__ import annotations


class FrostError(Exception):
    """The root of FROST's own error classes: graphs, buffers, files, plans, gates, drivers, engines that decline, backends.

    Each class is also a ValueError or a RuntimeError, whichever it means. A misspelt option is Python's TypeError, and an
    argument that names nothing (an engine, a device, a policy) a plain ValueError.
    """


class WireError(FrostError, ValueError):
    """Bytes that are no valid FROST message."""
