"""Which (query, key) pairs an attention op may see, apart from explicit boolean masks and sequence lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ALIGNMENTS = ("top_left", "bottom_right")


@dataclass(frozen=True)
class MaskDesc:
    """A diagonal band: with off = 0 (top_left) or Sk - Sq (bottom_right), row i sees key j iff
    i + off - left <= j <= i + off + right; None = unbounded on that side. causal means right = 0.

    Widths are run-time values; whether a side is bounded is known at plan time.
    """

    causal: bool = False
    align: str = "top_left"
    left: int | None = None
    right: int | None = None

    KEY: ClassVar[tuple[str, ...]] = ("causal", "align")
    RUNTIME: ClassVar[tuple[str, ...]] = ("left", "right")
    PRESENCE: ClassVar[tuple[str, ...]] = ("left", "right")  # None-ness of these run-time values is in the key

    @property
    def has_left(self) -> bool:
        return self.left is not None

    @property
    def has_right(self) -> bool:
        return self.causal or self.right is not None

    @property
    def band_right(self) -> int | None:
        """The right bound with causal folded in."""
        return 0 if self.causal else self.right

    @property
    def is_full(self) -> bool:
        return not (self.has_left or self.has_right)

    @property
    def family(self) -> str:
        """"none", "causal" or "window": the word capability rows use."""
        if self.is_full:
            return "none"
        return "causal" if self.causal and not self.has_left else "window"

    def key(self) -> tuple:
        # Engines route on the family (PyTorch's kernels know "causal" and no other right bound of 0), so causal and
        # right = 0 are two keys although they are the same set of pairs. A corner without a mask is no difference.
        align = self.align if not self.is_full else "top_left"
        return ("mask", align, self.causal, self.has_left, self.has_right)
