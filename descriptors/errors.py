"""The root of FROST's typed errors, and the one for bytes that cannot be read."""

from __future__ import annotations


class FrostError(Exception):
    """Every error that FROST raises on purpose about what it was given: graphs, buffers, files, engines that decline.

    Each class is also a ValueError or a RuntimeError, whichever it means.
    """


class WireError(FrostError, ValueError):
    """Bytes that are no valid FROST message."""
