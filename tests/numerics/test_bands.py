"""Which keys a row sees: corners, windows and causality, counted rather than computed.

With q = k = 0 and v one-hot, o times the number of keys seen is the row of the mask itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import run
from torch import Tensor

ENGINES = ("reference", "triton")
BR = "bottom_right"


def seen(engine: str, sq: int, sk: int, **options: Any) -> Tensor:
    """[Sq, Sk] of 0 and 1, from the kernel's own output."""
    got = run.forward(
        engine, torch.zeros(1, 1, sq, sk), torch.zeros(1, 1, sk, sk), torch.eye(sk)[None, None], **options
    )
    return (got["o"] * got["lse"].exp()[..., None])[0, 0].round().long()


def expected(sq: int, sk: int, left: int | None, right: int | None, align: str) -> Tensor:
    """Straight from the definition, one pair at a time."""
    off = sk - sq if align == BR else 0
    return torch.tensor(
        [
            [
                int((left is None or j >= i + off - left) and (right is None or j <= i + off + right))
                for j in range(sk)
            ]
            for i in range(sq)
        ]
    )


CORNERS = [
    (sq, sk, align, engine)
    for sq, sk in ((1, 4), (4, 2), (2, 5), (5, 5))
    for align in ("top_left", BR)
    for engine in ENGINES
] + [(4, 2, "top_left", "torch_sdpa"), (5, 5, BR, "torch_sdpa")]  # it declines the others


@pytest.mark.parametrize(("sq", "sk", "align", "engine"), CORNERS)
def test_the_causal_corner(sq: int, sk: int, align: str, engine: str) -> None:
    """onnxruntime#29020: one graph, two engines, two corners. Squares can't tell them apart."""
    assert torch.equal(seen(engine, sq, sk, causal=True, align=align), expected(sq, sk, None, 0, align))


def test_the_corners_that_the_reports_name() -> None:
    """Sq=1, Sk=4: key 0 alone from the top left, all four from the bottom right. Sq=4, Sk=2: rows 0 and 1 are
    empty from the bottom right, none from the top left."""
    for engine in ENGINES:
        assert seen(engine, 1, 4, causal=True).tolist() == [[1, 0, 0, 0]]
        assert seen(engine, 1, 4, causal=True, align=BR).tolist() == [[1, 1, 1, 1]]
        assert seen(engine, 4, 2, causal=True, align=BR).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
        assert seen(engine, 4, 2, causal=True).tolist() == [[1, 0], [1, 1], [1, 1], [1, 1]]


SIZES = ((4, 4), (5, 2), (2, 5))
WIDTHS = (None, 0, 1, 2, "S-1", "S", 10**6)


def width(w: Any, s: int) -> int | None:
    return {"S-1": s - 1, "S": s}.get(w, w) if isinstance(w, str) else w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("align", ["top_left", BR])
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_every_pair_of_window_widths(sq: int, sk: int, align: str, engine: str) -> None:
    """flash-attention#895: a right bound clamped to Sk loses keys; 0 and "unbounded" mixed up; off by one."""
    for a, b in itertools.product(WIDTHS, repeat=2):
        left, right = width(a, sk), width(b, sk)
        got = seen(engine, sq, sk, window=(left, right), align=align)
        assert torch.equal(got, expected(sq, sk, left, right, align)), (left, right, got)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_window_wider_than_the_text_stays_causal(engine: str) -> None:
    """libflash_attn PR#11: S=4, causal, L=100 is plain causal. And a window of W tokens is left = W - 1."""
    assert torch.equal(seen(engine, 4, 4, causal=True, window=(100, None)), expected(4, 4, None, 0, BR))
    assert torch.equal(seen(engine, 4, 4, causal=True, window=(100, 0)), expected(4, 4, None, 0, BR))
    assert seen(engine, 5, 5, window=(2, 0)).sum(1).tolist() == [1, 2, 3, 3, 3]
    assert torch.equal(seen(engine, 5, 2, window=(None, 10**6), align=BR), torch.ones(5, 2).long())


@pytest.mark.parametrize("engine", ENGINES)
def test_widths_up_to_the_largest_that_is_taken(engine: str) -> None:
    """No sum of positions and widths wraps in 32 bits."""
    for big in (2**30, 2**31 - 1):
        for align in ("top_left", BR):
            assert torch.equal(seen(engine, 5, 3, window=(big, big), align=align), torch.ones(5, 3).long())
            assert torch.equal(
                seen(engine, 5, 3, window=(big, 0), align=align), expected(5, 3, None, 0, align)
            )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "align": BR}, {"window": (1, 0), "align": BR}, {"window": (0, 2)}],
    ids=str,
)
def test_packed_and_padded_corners_come_from_each_sequences_own_lengths(
    options: dict[str, Any], engine: str
) -> None:
    """cudnn-frontend PR#683: the corner was anchored on the longest length. A batch of all four shapes, in
    both forms."""
    shapes = ((1, 4), (4, 2), (2, 5), (5, 5))
    want = []
    for sq, sk in shapes:
        left, right = options.get("window", (None, 0))
        want.append(expected(sq, sk, left, right, options.get("align", "top_left")))
    rows, keys = ([0, *itertools.accumulate(s[i] for s in shapes)] for i in (0, 1))
    v = torch.cat([torch.eye(5)[:sk] for _, sk in shapes])[:, None]
    cu = {"cu_seqlens_q": torch.tensor(rows), "cu_seqlens_kv": torch.tensor(keys)}
    packed = run.forward(engine, torch.zeros(rows[-1], 1, 8), torch.zeros(keys[-1], 1, 8), v, **cu, **options)
    counts = (packed["o"] * packed["lse"].exp()[..., None])[:, 0].round().long()
    for b, mask in enumerate(want):
        assert torch.equal(counts[rows[b] : rows[b + 1], : mask.shape[1]], mask), f"packed sequence {b}"

    lengths = {
        "seq_len_q": torch.tensor([s[0] for s in shapes]),
        "seq_len_kv": torch.tensor([s[1] for s in shapes]),
    }
    padded = run.forward(
        engine,
        torch.zeros(4, 1, 5, 8),
        torch.zeros(4, 1, 5, 8),
        torch.eye(5).expand(4, 1, 5, 5),
        **lengths,
        **options,
    )
    counts = (padded["o"] * padded["lse"].exp()[..., None])[:, 0].round().long()
    for b, mask in enumerate(want):
        assert torch.equal(counts[b, : mask.shape[0], : mask.shape[1]], mask), f"padded sequence {b}"
        assert not counts[b, mask.shape[0] :].any() and not counts[b, :, mask.shape[1] :].any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("sq", "sk", "left", "right", "align"),
    [
        (40, 66, 5, 3, "top_left"),
        (66, 40, 5, 3, BR),
        (40, 66, 33, 0, BR),
        (35, 35, 0, 0, "top_left"),
        (66, 40, None, 2, BR),
    ],
)
def test_a_band_is_the_mask_of_its_definition(
    sq: int, sk: int, left: int | None, right: int | None, align: str, engine: str
) -> None:
    """Forward and backward, over several tiles, against the same pairs as a boolean mask."""
    gen = torch.Generator().manual_seed(sq)
    q, k, v, do = (torch.randn(1, 1, s, 8, generator=gen) for s in (sq, sk, sk, sq))
    window = run.both(engine, run.problem_of(q, k, v, do), window=(left, right), align=align)
    mask = expected(sq, sk, left, right, align).bool()
    masked, _ = run.check(engine, q, k, v, do, mask=mask)
    for name, t in window.items():
        torch.testing.assert_close(
            t, masked[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
