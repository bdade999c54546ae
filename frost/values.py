"""Checks of values that live in operands (offsets, lengths): where reading them is free, or in debug mode.

`frost.debug(check_values=True)` turns them on for GPU operands too, which costs a sync per call. Without them a wrong
value gives wrong numbers at worst: no engine reads or writes outside a buffer because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from descriptors import (
    NSA_TYPES,
    NsaCompressedBwdDesc,
    NsaCompressedDesc,
    NsaSelectionBwdDesc,
    NsaSelectionDesc,
    NsaTopkDesc,
    OpDesc,
    SdpaBwdDesc,
    SdpaDesc,
)
from engines.reference.nsa_values import first_bad_entry
from engines.reference.values import first_bad_value

from . import env
from .errors import BindError

_forced: bool | None = None


class debug:
    """Switch debug checks on or off, at once; as a context manager the old setting comes back at its end.

    `frost.debug(check_values=True)`. Raises TypeError for anything but a keyword that exists, with a boolean.
    """

    def __init__(self, *args: object, **options: object) -> None:
        global _forced
        wrong = [repr(a) for a in args] + [name for name in options if name != "check_values"]
        if wrong or not isinstance(options.get("check_values", True), bool):
            given = ", ".join(wrong) or f"check_values={options['check_values']!r}"
            raise TypeError(f"debug: given {given}, expected frost.debug(check_values=True) or (check_values=False)")
        self._before = _forced
        _forced = bool(options.get("check_values", True))

    def __enter__(self) -> debug:
        return self

    def __exit__(self, *_: object) -> None:
        global _forced
        _forced = self._before


def _attention(desc: SdpaDesc | SdpaBwdDesc, operands: Mapping[str, torch.Tensor]) -> str | None:
    given = {n: operands.get(n) for n in ("cu_seqlens_q", "cu_seqlens_kv", "seq_len_q", "seq_len_kv")}
    if not any(t is not None for t in given.values()):
        return None
    pairs = [(name, int(t.shape[-2]), int(t.shape[-1]))  # type: ignore[arg-type]
             for name, t in (("bias", desc.bias), ("mask", desc.mask)) if t is not None and desc.packed]
    return first_bad_value(**given, extent_q=desc.seqlen_q, extent_kv=desc.seqlen_kv,  # type: ignore[arg-type]
                           max_seqlen_q=desc.max_seqlen_q, max_seqlen_kv=desc.max_seqlen_kv, pairs=pairs)


# Packed, what bounds their sequences is an option: importance and choices are sized by it.
_TOLD_THE_LONGEST = (NsaCompressedDesc, NsaCompressedBwdDesc, NsaTopkDesc)


def _sparse(desc: Any, operands: Mapping[str, torch.Tensor]) -> str | None:
    cu = operands.get("cu_seqlens")
    bad = None
    if cu is not None:
        total = operands["q" if "q" in operands else "x" if "x" in operands else "importance"].shape[0]
        longest = desc.seqlen_kv if isinstance(desc, _TOLD_THE_LONGEST) else None
        bad = first_bad_value(cu_seqlens_q=cu, extent_q=total, extent_kv=total, max_seqlen_q=longest)
    if bad is not None:
        return bad.replace("cu_seqlens_q", "cu_seqlens").replace("max_seqlen_q", "seqlen_kv")
    if not isinstance(desc, (NsaSelectionDesc, NsaSelectionBwdDesc)):
        return None
    # An index that is no block is legal (see the op); only who asked for checks hears of one beyond the -1 of padding.
    return first_bad_entry(operands["block_indices"], operands.get("block_counts"), cu, desc.block_size,
                           int(desc.seqlen_kv), indices=_asked_for())  # type: ignore[arg-type]


# op record -> the first bad value as a sentence, or None
CHECKS: dict[type[OpDesc], Callable[[Any, Mapping[str, torch.Tensor]], str | None]] = {
    SdpaDesc: _attention, SdpaBwdDesc: _attention, **dict.fromkeys(NSA_TYPES.values(), _sparse),
}

# Fields that carry checkable values: a step without them is never looked at again.
VALUE_FIELDS = frozenset({"cu_seqlens_q", "cu_seqlens_kv", "seq_len_q", "seq_len_kv", "cu_seqlens",
                          "block_indices", "block_counts"})


def has_values(desc: OpDesc) -> bool:
    return type(desc) in CHECKS and any(name in VALUE_FIELDS for name, _ in desc.tensors())


def _asked_for() -> bool:
    return env.check_values() if _forced is None else _forced


def wanted(on_cpu: bool) -> bool:
    """Whether to read values now."""
    if on_cpu:
        return True
    return _asked_for() and not torch.cuda.is_current_stream_capturing()


def check(node: str, desc: OpDesc, operands: Mapping[str, torch.Tensor]) -> None:
    """Raises BindError naming the first bad value of a step's operands."""
    bad = CHECKS[type(desc)](desc, operands)
    if bad is not None:
        raise BindError(f"node {node!r}: {bad}")
