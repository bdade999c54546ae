"""The operands of a case: seeded values, in the layout that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("bhsd", "bshd")


@dataclass
class Operands:
    """q, k, v, do, and the optional operands under the names that `Graph.sdpa` gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as autograd leaves over the same memory."""
        return tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))  # type: ignore[return-value]


def make(case: Case, *, device: torch.device | str = "cuda", layout: str = "bhsd", seed: int = 0) -> Operands:
    """Normal random values: zeros would run faster than real data and hide wrong indexing. On the device
    "meta" there are shapes and strides only, which is all that compiling needs."""
    pick = None if str(device) == "meta" else torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=pick, device=device, dtype=torch.float32).to(dtype)

    def main(heads: int) -> Tensor:
        if case.packed:
            return normal(case.b * case.s, heads, case.d)
        if layout == "bshd":
            return normal(case.b, case.s, heads, case.d).transpose(1, 2)
        return normal(case.b, heads, case.s, case.d)

    made = Operands(main(case.hq), main(case.hk), main(case.hk), main(case.hq))
    scores = {
        "full": (1, 1, case.s, case.s),
        "heads": (1, case.hq, case.s, case.s),
        "keys": (case.b, 1, 1, case.s),
    }
    if case.bias:
        made.options["bias"] = normal(*scores[case.bias])
    if case.mask:
        keep = torch.rand(scores[case.mask], generator=pick, device=device) < 0.9
        made.options["mask"] = keep
    if case.sink:
        made.options["sink"] = torch.randn((case.hq,), generator=pick, device=device)
    if case.seq_lens:  # full lengths: the work is that of the base case, what is measured is the option
        lengths = torch.full((case.b,), case.s, dtype=torch.int32, device=device)
        made.options |= {"seq_len_q": lengths, "seq_len_kv": lengths.clone()}
    if case.packed:
        offsets = torch.arange(case.b + 1, dtype=torch.int32, device=device) * case.s
        made.options |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets.clone()}
    return made


def empty_like(x: Tensor) -> Tensor:
    """A NaN-filled buffer with the shape and strides of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(float("nan"))


def poison_free_memory(*like: Tensor) -> None:
    """Leave NaN in the blocks that the allocator will hand out next for tensors of these sizes: a candidate
    that allocates its own outputs and writes only part of them shows it."""
    held = [torch.full_like(x, float("nan")) for x in like for _ in range(2)]
    del held
