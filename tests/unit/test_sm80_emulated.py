"""The SM80 kernels' own source, run on a CPU against emulated instructions and held to the gate's tolerances."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from sm80_emulator import NAME, emulated, needs_compiler  # noqa: F401 - a fixture

import frost
from engines.sm80 import configs, configs_bwd, params
from frost.equivalence import configs_for, run_config

pytestmark = needs_compiler

# Rows that between them take every branch of the kernels; the others run with the slow tests.
FAST = ("bf16-d64", "bf16-d192-dv128", "fp16-d40", "group-7", "no-keys", "window-both", "scale-negative",
        "softcap-causal-bias", "bias-minus-inf", "sink-empty-rows", "lengths-bottom-right", "packed-window-sink",
        "layout-offset-by-one")
FAST_BACKWARD = ("fp16-d40", "one-by-one", "no-keys", "causal-tall", "scale-zero",
                 "bias-one-number", "mask-keys", "sink-empty-rows", "lengths", "only-dq", "dlse-sink-packed")


def rows_of(op: str, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(c, id=c.name, marks=() if c.name in fast else (pytest.mark.tables,)) for c in configs_for(op, "cpu")
            if c.dtype in ("fp16", "bf16") and c.layout not in ("last2", "transposed")]


@pytest.mark.parametrize("config", rows_of("sdpa", FAST))
def test_forward_matches_the_oracle(config: Any, emulated: Any) -> None:  # noqa: F811
    emulated()
    result = run_config(config, NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("config", rows_of("sdpa_backward", FAST_BACKWARD))
def test_backward_matches_the_oracle(config: Any, emulated: Any) -> None:  # noqa: F811
    emulated()
    result = run_config(config, NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("row", ["causal-tall", pytest.param("bf16-d256", marks=pytest.mark.tables),
                                 pytest.param("bf16-d128-causal", marks=pytest.mark.tables),
                                 pytest.param("packed-window-sink", marks=pytest.mark.tables),
                                 pytest.param("bf16-d80-dv48", marks=pytest.mark.tables)])
def test_deterministic_backward_is_bit_equal(row: str, emulated: Any) -> None:  # noqa: F811
    """Plain scores take another kernel for dQ where determinism is asked for."""
    emulated()
    config = next(c for c in configs_for("sdpa_backward", "cpu") if c.name == row)
    result = run_config(dataclasses.replace(config, deterministic=True), NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.tables
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("row", ["bf16-d64", "bf16-d96", "bf16-d128-causal", "bf16-d192-dv128", "bf16-d256", "window-both",
                                 "packed-bias"])
@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (9, 0)], ids=str)
def test_every_backward_tile_of_every_arch_class(cc: tuple[int, int], row: str, deterministic: bool,
                                                 emulated: Any) -> None:  # noqa: F811
    """With copies that land early: the rows above have them land late."""
    emulated(cc, lazy=False)
    config = next(c for c in configs_for("sdpa_backward", "cpu") if c.name == row)
    result = run_config(dataclasses.replace(config, deterministic=deterministic), NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.tables
@pytest.mark.parametrize("cc", [(8, 0), (8, 6)], ids=str)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_every_tile_of_every_arch_class(cc: tuple[int, int], lazy: bool, emulated: Any) -> None:  # noqa: F811
    """Tiles differ in warps, rows per warp and stages: what one gets right by luck of timing another shows."""
    emulated(cc, lazy)
    rows = ("bf16-d64", "bf16-d96", "bf16-d128-causal", "bf16-d192-dv128", "bf16-d256", "window-both", "packed-bias")
    for config in configs_for("sdpa", "cpu"):
        if config.name in rows:
            result = run_config(config, NAME, "cpu")
            assert result.verdict == "pass", f"{config.name}: {result.detail}"


# The tile of d = 256 in which pairs of warps share rows, on rows of smaller head dims that it covers.
SHARED_ROWS = ("bf16-d128-causal", "window-both", "packed-window-sink", "sink-empty-rows", "scale-negative", "lengths", "group-7",
               "no-keys", "softcap", "fp16-d40")


@pytest.mark.parametrize("lazy", [True, pytest.param(False, marks=pytest.mark.tables)], ids=["lazy", "eager"])
@pytest.mark.parametrize("row", [r if i < 4 else pytest.param(r, marks=pytest.mark.tables) for i, r in enumerate(SHARED_ROWS)])
def test_warps_that_share_rows(row: str, lazy: bool, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tile = next(r.tile for r in configs.FWD if (r.arch, r.flavor, r.scores) == ("hopper", (256, 256), "plain"))
    assert tile.d_split == 2
    monkeypatch.setattr(configs, "FWD", tuple(dataclasses.replace(r, tile=tile) if r.scores == "plain" else r
                                              for r in configs.FWD if r.scores != "partial"))
    monkeypatch.setattr(params, "FLAVORS", ((128, 128), (192, 128), (256, 256)))
    emulated((9, 0), lazy)
    config = next(c for c in configs_for("sdpa", "cpu") if c.name == row)
    result = run_config(config, NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("row", ["mask-full", pytest.param("packed-bias", marks=pytest.mark.tables),
                                 pytest.param("softcap-causal-bias", marks=pytest.mark.tables)])
def test_warps_that_share_keys_in_fours(row: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """With a mask or bias, which need to know what the other warps' rows see; on rows of smaller head dims."""
    tile = next(r.tile for r in configs_bwd.DKDV if (r.arch, r.flavor, r.scores) == ("blackwell", (256, 256), "rich"))
    assert tile.d_split == 4
    monkeypatch.setattr(params, "FLAVORS", ((256, 256), (64, 64)))  # the first that covers; 64 for kernels without products
    emulated((12, 0))
    config = next(c for c in configs_for("sdpa_backward", "cpu") if c.name == row)
    result = run_config(config, NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("more", [{"seqlen": (200, 160), "lens_q": None, "lens_kv": (100, 90)},
                                  {"seqlen": (160, 200), "lens_q": (100, 90), "lens_kv": None}], ids=["keys", "rows"])
def test_a_band_that_ends_before_it_begins(more: dict[str, Any], deterministic: bool, emulated: Any) -> None:  # noqa: F811
    """Top-left, one side longer: what the last tiles would see lies past the other side's end, in the tile that holds that
    end. Nothing there is read: it is NaN here, and somebody else's memory elsewhere."""
    emulated()
    config = dataclasses.replace(next(c for c in configs_for("sdpa_backward", "cpu") if c.name == "lengths"), causal=False,
                                 window=(5, 5), deterministic=deterministic, **more)
    result = run_config(config, NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("hide", ["mask", "bias"])
@pytest.mark.parametrize("d", [64, pytest.param(256, marks=pytest.mark.tables)])
def test_a_key_hidden_from_everybody_leaks_nothing(d: int, hide: str, softcap: float | None, emulated: Any) -> None:  # noqa: F811
    """Whatever is stored there: its scores are NaN, and so is a softcap's slope at them."""
    emulated()
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, d, generator=gen).bfloat16() for n in (40, 50, 50))
    keep = torch.rand(40, 50, generator=gen) < 0.8
    keep[:, 3], keep[:, 44] = False, False
    option = {"mask": keep} if hide == "mask" else {"bias": torch.where(keep, 0.0, -math.inf).bfloat16()}
    results = []
    for stored in (0.0, math.nan):
        k[:, :, [3, 44]], v[:, :, [3, 44]] = stored, stored
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = frost.attention(*leaves, **option, softcap=softcap, deterministic=True, engines=[NAME], gates="off")
        results.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


def test_copies_that_land_early_change_nothing(emulated: Any) -> None:  # noqa: F811
    """An asynchronous copy may land at any time up to its wait: nobody still reads what it overwrites."""
    emulated((8, 6), lazy=False)
    config = next(c for c in configs_for("sdpa", "cpu") if c.name == "bf16-d192-dv128")
    assert run_config(config, NAME, "cpu").verdict == "pass"


@pytest.mark.parametrize("rows", [5, 1])
def test_a_bias_axis_that_is_symbolic_may_be_bound_to_one(rows: int, emulated: Any) -> None:  # noqa: F811
    """Which kernel sums dBias was settled at the declared maximum, and so was what its partial sums look like. dLSE alone is
    handed on, so the gradient of a bias that every key shares is dLSE."""
    emulated()
    q = frost.sym("Sq", max=64)
    g = frost.Graph("symbolic")
    shapes: dict[str, Any] = {"q": (1, 3, q, 64), "k": (1, 3, 40, 64), "v": (1, 3, 40, 64), "o": (1, 3, q, 64), "do": (1, 3, q, 64)}
    t = {n: g.tensor(n, s, dtype="bf16") for n, s in shapes.items()}
    more = {n: g.tensor(n, s, dtype="fp32") for n, s in {"lse": (1, 3, q), "dlse": (1, 3, q), "bias": (1, 3, q, 1)}.items()}
    made = g.sdpa_backward(*(t[n] for n in ("q", "k", "v", "o", "do")), **more, dbias=True, grads=())
    g.output(made.dbias, name="dbias")
    plan = g.compile("cpu", engines=[NAME], gates="off")
    gen = torch.Generator().manual_seed(0)
    feeds = {n: torch.randn(1, 3, rows if n in ("q", "o", "do") else 40, 64, generator=gen).bfloat16() for n in shapes}
    p = feeds["q"].double() @ feeds["k"].double().mT / 8
    feeds |= {"o": (p.softmax(-1) @ feeds["v"].double()).bfloat16(), "lse": p.logsumexp(-1).float(), "bias": torch.zeros(1, 3, rows, 1),
              "dlse": torch.randn(1, 3, rows, generator=gen)}
    space = torch.full((plan.workspace_size,), 0x7F, dtype=torch.uint8)
    got = plan.execute(feeds, workspace=space)["dbias"]
    torch.testing.assert_close(got[..., 0], feeds["dlse"], atol=3e-2, rtol=3e-2)
