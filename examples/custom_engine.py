"""A third-party engine: what it takes to let FROST route attention to code of your own.

    python examples/custom_engine.py

`OnlineSoftmaxEngine` runs attention forward in one pass over the keys, in plain torch. As a package of its own, two lines
in its pyproject.toml would make FROST find it:

    [project.entry-points."frost.engines"]
    online_softmax = "my_package.engine:ENGINE"

Here it is registered in the process. Ends with PASS or FAIL, and with that as the exit code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import frost
from descriptors import DType, OpDesc, SdpaDesc
from engines import registry
from engines.base import (
    Adapter,
    BoundCall,
    Capabilities,
    Engine,
    Executable,
    Launch,
    Reason,
    Region,
    SdpaFwdDsl,
    Support,
    Target,
    Workspace,
)

BLOCK = 16

# What it can do, as data. `features` lists the options it consumes: with any other one set, it declines by itself.
ROWS = (
    Capabilities("online_softmax", "sdpa", devices=("cpu",), dtypes=(DType.F32,), features=frozenset({"causal", "lse"}),
                 groups="mha", symbolic=False, allocates=True, note="one pass over the keys in plain torch"),
)


def online_softmax(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, acc: Tensor, scale: float,
                   causal: bool) -> None:
    """Attention with a running maximum and sum per row: no more than `BLOCK` columns of scores at a time."""
    rows = torch.arange(q.shape[2])[:, None]
    top = torch.full((*q.shape[:3], 1), -math.inf)
    total = torch.zeros_like(top)
    acc.zero_()
    for start in range(0, k.shape[2], BLOCK):
        keys, values = k[:, :, start:start + BLOCK], v[:, :, start:start + BLOCK]
        s = scale * q @ keys.mT
        if causal:
            s = s.masked_fill(torch.arange(start, start + keys.shape[2]) > rows, -math.inf)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        p = (s - new_top).exp()
        shrink = (top - new_top).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc.mul_(shrink).add_(p @ values)
        top = new_top
    o.copy_(acc / total)
    if lse is not None:
        lse.copy_((top + total.log()).squeeze(-1))


class OnlineSoftmax(Executable):
    """Nothing is compiled here; an engine with kernels keeps them in this object."""

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        desc, x = launch.desc, launch.operands
        assert isinstance(desc, SdpaDesc)  # what the adapter below serves
        acc = workspace.tensor("acc").view(torch.float32).view(x["o"].shape)

        def call(stream: int) -> None:
            online_softmax(x["q"], x["k"], x["v"], x["o"], x.get("lse"), acc, desc.scale_value, desc.band.causal)

        return call

    def describe(self) -> Mapping[str, Any]:
        return {"kernels": ["online_softmax"], "block": BLOCK}


class OnlineSoftmaxFwd(SdpaFwdDsl):
    """The forward cell. A backward cell would subclass `SdpaBwdDsl` in the same way."""

    engine = "online_softmax"
    capabilities = ROWS

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        """The rows, and what they cannot say."""
        support = super().check_support(desc, target)
        if isinstance(desc, SdpaDesc) and not (desc.o.numel and desc.k.numel):
            return Support((*support.reasons, Reason("shape", "no elements", "at least one row and one key")))
        return support

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        """Sized, carved and placed by the plan; this list is all that says how much."""
        assert isinstance(desc, SdpaDesc)
        return (Region("acc", 4 * desc.o.numel),)

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return OnlineSoftmax()


class OnlineSoftmaxEngine(Engine):
    """What the entry point names."""

    name = "online_softmax"
    _ADAPTERS: tuple[Adapter, ...] = (OnlineSoftmaxFwd(),)

    def adapters(self) -> tuple[Adapter, ...]:
        return self._ADAPTERS


ENGINE = OnlineSoftmaxEngine()


def served_by(**options: Any) -> tuple[str, float, list[str]]:
    """(engine, largest difference to the fp64 reference, reasons of our engine) for one call with these options."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=made) for _ in range(3))
    frost.routing.reset()
    o = frost.attention(q, k, v, **options)
    route = frost.routing.routes()[0]
    options.pop("engines", None)
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    want = frost.attention(q.double(), k.double(), v.double(), engines=["reference"], **wide)
    return route.engine, (o - want).abs().max().item(), [str(d) for d in route.declined if d.engine == ENGINE.name]


def main() -> int:
    registry.register(ENGINE, priority=10)  # before the built-in ones
    print("engines, in order of preference:", ", ".join(registry.names()))
    wrong = []
    for options, expected in (
        ({"causal": True}, True),
        ({"causal": True, "engines": [ENGINE.name]}, True),
        ({"causal": True, "bias": torch.randn(40, 40)}, False),  # an option outside its row: the next engine serves
    ):
        shown = ", ".join(f"{n}={'…' if isinstance(x, Tensor) else x}" for n, x in options.items())
        engine, off, reasons = served_by(**options)
        print(f"attention({shown}) -> {engine}, max difference {off:.1e}")
        for reason in reasons:
            print(f"    {ENGINE.name} declined: {reason}")
        if off > 1e-5 or (engine == ENGINE.name) != expected or bool(reasons) == expected:
            wrong.append(shown)
    try:
        served_by(softcap=1.0, engines=[ENGINE.name])
        wrong.append("softcap was dropped")
    except frost.NotSupportedError as e:
        print("asked for by name, it never falls back:", *e.reasons[ENGINE.name])
    registry.unregister(ENGINE.name)
    print(f"FAIL custom_engine: {wrong}" if wrong else "PASS custom_engine: routed to where it serves, declined with reasons "
          "where it does not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
