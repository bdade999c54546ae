"""Conformance: FROST against answers and formulas that were written elsewhere.

Three sources, each with suites of its own: the vectors of the `Attention` operator that ship with ONNX,
PyTorch's own attention, and the attention functions of Hugging Face's models. The library needs none of
them; where a source isn't installed its suites are skipped by name, and `pip install '.[dev]'` installs
them all.

A peer is asked in fp64, so that its formula is compared and not its rounding. The fixtures here take away
what keeps two of them from answering in fp64 on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor


@pytest.fixture
def flex_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has a CPU backward, but its front door refuses tensors that need one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.fixture
def softmax_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models' eager functions ask for a softmax in fp32. Asked in fp64 they are to answer in fp64."""
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return plain(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
