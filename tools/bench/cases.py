"""What is measured: the case tables, and the arithmetic that turns a time into TFLOP/s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

SUITES = ("dense", "gqa", "short", "host", "overheads")
DIRECTIONS = ("fwd", "bwd")
BACKWARD_FLOPS = 2.5  # five matrix products where the forward has two


@dataclass(frozen=True)
class Case:
    """One problem. q is [b, hq, s, d], k and v [b, hk, s, d]. `bias` and `mask` name a shape: "full" is [1,
    1, s, s], "heads" [1, hq, s, s], "keys" [b, 1, 1, s]. `packed`: the same tokens as b sequences of one
    packed batch. `relative_to` names the case of the suite that this one's cost is compared with."""

    suite: str
    name: str
    b: int
    hq: int
    hk: int
    s: int
    d: int
    causal: bool = False
    dtype: str = "bf16"
    window_left: int | None = None
    softcap: float | None = None
    sink: bool = False
    bias: str | None = None
    mask: str | None = None
    seq_lens: bool = False
    packed: bool = False
    deterministic: bool = False
    relative_to: str | None = None

    @property
    def group(self) -> int:
        return self.hq // self.hk

    @property
    def plain(self) -> bool:
        """No option beyond causal and a window: what every peer means by attention."""
        return not (self.softcap or self.sink or self.bias or self.mask or self.seq_lens or self.packed)

    @property
    def options(self) -> str:
        """The set options as one word for tables and CSV."""
        parts = [
            f"window{self.window_left}" if self.window_left is not None else "",
            f"softcap{self.softcap:g}" if self.softcap else "",
            "sink" if self.sink else "",
            f"bias:{self.bias}" if self.bias else "",
            f"mask:{self.mask}" if self.mask else "",
            "seq_lens" if self.seq_lens else "",
            "packed" if self.packed else "",
            "deterministic" if self.deterministic else "",
        ]
        return "+".join(p for p in parts if p)


def visible_pairs(s: int, causal: bool, window_left: int | None) -> float:
    """(query, key) pairs of one head that count: s * s, halved when causal, and exact where a window cuts
    more."""
    if window_left is None:
        return s * s / 2 if causal else float(s * s)
    right = 0 if causal else s
    return float(sum(min(s, i + right + 1) - max(0, i - window_left) for i in range(s)))


def flops(case: Case, direction: str) -> float:
    """Forward 2 * B * H * pairs * (D + Dv); backward 2.5 times that."""
    forward = 2.0 * case.b * case.hq * visible_pairs(case.s, case.causal, case.window_left) * 2 * case.d
    return forward * (BACKWARD_FLOPS if direction == "bwd" else 1.0)


def tflops(case: Case, direction: str, ms: float) -> float:
    """TFLOP/s at `ms` milliseconds."""
    return flops(case, direction) / (ms * 1e-3) / 1e12


def _dense(tokens: int = 16384, hidden: int = 2048) -> Iterable[Case]:
    for d in (64, 128, 256):
        for s in (2048, 8192):
            for causal in (False, True):
                heads = hidden // d
                yield Case("dense", f"s{s} d{d} {_corner(causal)}", tokens // s, heads, heads, s, d, causal)


def _short() -> Iterable[Case]:
    for d in (64, 128):
        for causal in (False, True):
            heads = 2048 // d
            yield Case("short", f"s512 d{d} {_corner(causal)}", 32, heads, heads, 512, d, causal)
    for d in (64, 128):
        for causal in (False, True):
            yield Case("short", f"b1 h8 s1024 d{d} {_corner(causal)}", 1, 8, 8, 1024, d, causal)


def _corner(causal: bool) -> str:
    return "causal" if causal else "full"


_BASE = Case("overheads", "full", 4, 16, 16, 4096, 128)
_LONG = Case("overheads", "s16384 causal", 1, 16, 16, 16384, 128, causal=True)


def _option(name: str, relative_to: str = "full", **options: Any) -> Case:
    return replace(_BASE, name=name, relative_to=relative_to, **options)




def _order(d: int) -> Iterable[Case]:
    """What sums in a fixed order cost at a head dim."""
    for causal in (False, True):
        plain = replace(_BASE, name=f"d{d} {_corner(causal)}", hq=2048 // d, hk=2048 // d, d=d, causal=causal)
        yield plain
        yield replace(plain, name=f"{plain.name} deterministic", deterministic=True, relative_to=plain.name)


_OVERHEADS = (
    _BASE,
    replace(_BASE, name="causal", causal=True),
    _option("softcap", softcap=30.0),
    _option("sink", sink=True),
    _option("bias [1,1,S,S]", bias="full"),
    _option("bias [1,H,S,S]", bias="heads"),
    _option("bias [B,1,1,S]", bias="keys"),
    _option("mask [1,1,S,S]", mask="full"),
    _option("padding lengths", seq_lens=True),
    _option("packed", packed=True),
    _option("packed causal", "causal", packed=True, causal=True),
    _option("window 512", "causal", causal=True, window_left=512),
    _option("deterministic", deterministic=True),
    _option("deterministic causal", "causal", deterministic=True, causal=True),
    _LONG,
    replace(_LONG, name="s16384 window 512", window_left=512, relative_to=_LONG.name),
    *_order(64),
    *_order(256),
)

# "host" has shapes so small that the device is never what is measured.
TABLES: dict[str, tuple[Case, ...]] = {
    "dense": tuple(_dense()),
    "gqa": (Case("gqa", "gqa b4 h32/8 s4096 d128 causal", 4, 32, 8, 4096, 128, True),),
    "short": tuple(_short()),
    "host": (Case("host", "b1 h2 s64 d64", 1, 2, 2, 64, 64),),
    "overheads": _OVERHEADS,
}


def select(
    suites: Sequence[str], *, head_dims: Sequence[int] = (), match: str = "", quick: bool = False
) -> tuple[Case, ...]:
    """Cases of the named suites ("all": every one), optionally only some head dims or names containing
    `match`.

    `quick` keeps the s8192 cases of the dense table up to d128. Raises ValueError for an unknown suite.
    """
    wanted = SUITES if "all" in suites else tuple(suites)
    unknown = [s for s in wanted if s not in TABLES]
    if unknown:
        raise ValueError(f"cases: given {unknown}, expected some of {[*SUITES, 'all']}")
    out = []
    for suite in wanted:
        for case in TABLES[suite]:
            if head_dims and case.d not in head_dims or match not in case.name:
                continue
            if quick and suite == "dense" and (case.s != 8192 or case.d > 128):
                continue
            out.append(case)
    return tuple(out)
