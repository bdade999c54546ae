"""All buffers of one execution in one allocation: one copy to the device, one back, everything else is judged on the CPU.

Between the buffers, and around what they hold, lie NaN (in any float) or canaries. Reading the arena back shows results,
operands that were changed and stray writes anywhere in it, and many processes that share a device hardly wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # of every buffer; offsets inside a buffer decide how an operand is aligned
GUARD = 1024     # bytes between two buffers
_NAN = 0xFF      # a NaN in fp16, bf16 and fp32 when repeated


class Arena:
    """The buffers behind `tensors` (CPU views, each in a storage of its own), and their image on a device."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors, self.device = dict(tensors), device
        self.at: dict[str, int] = {}
        end = GUARD
        for name, t in self.tensors.items():
            self.at[name] = end
            end += -(-(t.untyped_storage().nbytes() + GUARD) // ALIGNMENT) * ALIGNMENT
        self.before = torch.full((end,), _NAN, dtype=torch.uint8)
        for name, t in self.tensors.items():
            raw = _bytes_of(t)
            self.before[self.at[name]:self.at[name] + raw.numel()] = raw
        self.image = torch.empty(end, dtype=torch.uint8, device=device)
        if self.image.data_ptr() % 64:
            raise RuntimeError("the allocator returned less than 64-byte alignment")

    def upload(self) -> dict[str, Tensor]:
        """Fresh operands and results on the device."""
        self.image.copy_(self.before)
        return {name: _view(self.image, self.at[name], t) for name, t in self.tensors.items()}

    def fetch(self) -> Tensor:
        """What is there now, on the CPU. Waits for the device."""
        return self.image.to("cpu", copy=True)

    def results(self, fetched: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: _view(fetched, self.at[name], self.tensors[name]) for name in names}

    def faults(self, fetched: Tensor, outputs: Sequence[Any]) -> list[str]:
        """Bytes that changed and are no element of a result. `outputs`: the suite's canary buffers, by name in `tensors`."""
        may = torch.zeros(fetched.numel(), dtype=torch.bool)
        for out in outputs:
            t = self.tensors[out.name]
            inside = out._inside.repeat_interleave(t.element_size())
            may[self.at[out.name]:self.at[out.name] + inside.numel()] = inside
        wrong = ((fetched != self.before) & ~may).nonzero().flatten()
        if not wrong.numel():
            return []
        first = int(wrong[0])
        return [f"{wrong.numel()} bytes outside the results were written, the first {self._place(first)}"]

    def _place(self, byte: int) -> str:
        name = max((n for n, at in self.at.items() if at <= byte + GUARD // 2), key=lambda n: self.at[n], default="")
        if not name:
            return "before the first buffer"
        t = self.tensors[name]
        start = self.at[name] + t.storage_offset() * t.element_size()
        return f"{byte - start} bytes from the start of {name}"


def _bytes_of(t: Tensor) -> Tensor:
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _view(arena: Tensor, at: int, like: Tensor) -> Tensor:
    size = like.untyped_storage().nbytes()
    whole = arena[at:at + size].view(like.dtype)
    # The slice's own offset counts in elements of the view's type.
    return whole.as_strided(like.shape, like.stride(), whole.storage_offset() + like.storage_offset())
