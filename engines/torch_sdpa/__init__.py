"""PyTorch's own attention as an engine: routed where it is exact, declined with reasons elsewhere."""

from .adapter import ENGINE

__all__ = ["ENGINE"]
