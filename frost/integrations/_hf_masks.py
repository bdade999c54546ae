"""What a transformers mask function means, read back as structure where that is certain.

transformers describes a mask as nested functions of (batch, head, q, kv). Built in full it is B * Sq * Sk
booleans. Most are a band (causal, maybe a window), a row of valid keys, and packed sequences: attention
does those without any matrix. Whatever is not recognised is built in full, and exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The attribute of a [B | 1, Sk] mask that carries its structure through a model to its attention.
ATTRIBUTE = "_frost_visible"


@dataclass
class Visible:
    """Who sees whom beside the valid keys. `window`: keys further back than this are not seen; None is
    unbounded. `segments` [B, S]: only tokens of the same number see each other. `padded`: the mask it hangs
    on has a False.
    """

    causal: bool
    window: int | None = None
    segments: Tensor | None = None
    padded: bool = False
    _offsets: tuple[Tensor, int] | None = None

    def offsets(self) -> tuple[Tensor, int]:
        """(cu_seqlens, longest) of the segments over the flattened batch. Read from the device once per
        forward pass.
        """
        if self._offsets is None:
            assert self.segments is not None
            rows = self.segments
            first = torch.ones_like(rows, dtype=torch.bool)
            first[:, 1:] = rows[:, 1:] != rows[:, :-1]
            starts = first.flatten().nonzero().flatten()
            cu = torch.cat([starts, starts.new_tensor([rows.numel()])]).to(torch.int32)
            self._offsets = cu, int(cu.diff().max())
        return self._offsets


def closure(fn: Callable[..., Any]) -> dict[str, Any]:
    """The free variables of a nested function, by name."""
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells)}


def _is_made_by(fn: Callable[..., Any], factory: Callable[..., Any]) -> bool:
    """Whether `fn` is a function that transformers' `factory` returned."""
    return getattr(fn, "__module__", None) == factory.__module__ and getattr(
        fn, "__qualname__", ""
    ).startswith(f"{factory.__qualname__}.<locals>.")


def read(fn: Callable[..., Any], masks: Any) -> Visible | None:
    """The structure of a mask function of the module `masks` (transformers.masking_utils); None where it is
    not a known one.
    """
    out = Visible(causal=False)
    return out if _read(fn, masks, out) else None


def _read(fn: Callable[..., Any], masks: Any, out: Visible) -> bool:
    if fn is masks.causal_mask_function:
        out.causal = True
        return True
    if fn is masks.bidirectional_mask_function:
        return True
    if _is_made_by(fn, masks.and_masks):
        parts = closure(fn).get("mask_functions")
        return isinstance(parts, tuple) and len(parts) > 0 and all(_read(part, masks, out) for part in parts)
    if _is_made_by(fn, masks.sliding_window_overlay):
        window = closure(fn).get("sliding_window")
        if not isinstance(window, int) or window < 1:
            return False
        out.window = window - 1 if out.window is None else min(out.window, window - 1)
        return True
    if _is_made_by(fn, masks.packed_sequence_mask_function):
        segments = closure(fn).get("packed_sequence_mask")
        if not isinstance(segments, Tensor) or out.segments is not None:
            return False
        out.segments = segments
        return True
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    if remap is not None and _is_made_by(fn, remap):
        # Positions count up by one within a sequence, so a band over positions is the same band over tokens
        # there; between sequences nothing is seen, which the packed part beside it says.
        inner = closure(fn).get("mask_function")
        return inner is not None and _read(inner, masks, out)
    return False


def mark(mask: Tensor, visible: Visible) -> Tensor:
    setattr(mask, ATTRIBUTE, visible)
    return mask


def marked(mask: Tensor | None) -> Visible | None:
    """The structure a mask carries, None where it has none (or lost it on the way, through a copy)."""
    return None if mask is None else getattr(mask, ATTRIBUTE, None)
