"""The SM80 kernels' own source, run on a CPU against emulated instructions and held to the gate's tolerances."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sm80_emulator import NAME, emulated, needs_compiler  # noqa: F401 - a fixture

from frost.equivalence import configs_for, run_config

pytestmark = needs_compiler

# Rows that between them take every branch of the kernels; the others run with the slow tests.
FAST = ("bf16-d64", "bf16-d192-dv128", "fp16-d40", "group-7", "no-keys", "window-both", "scale-negative",
        "softcap-causal-bias", "bias-minus-inf", "sink-empty-rows", "lengths-bottom-right", "packed-window-sink",
        "layout-offset-by-one")
FAST_BACKWARD = ("fp16-d40", "one-by-one", "no-keys", "causal-tall", "scale-zero",
                 "bias-one-number", "mask-keys", "sink-empty-rows", "lengths", "only-dq", "dlse-sink-packed")


def rows_of(op: str, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(c, id=c.name, marks=() if c.name in fast else (pytest.mark.slow,)) for c in configs_for(op, "cpu")
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


@pytest.mark.parametrize("row", ["causal-tall", pytest.param("bf16-d256", marks=pytest.mark.slow),
                                 pytest.param("bf16-d128-causal", marks=pytest.mark.slow),
                                 pytest.param("packed-window-sink", marks=pytest.mark.slow),
                                 pytest.param("bf16-d80-dv48", marks=pytest.mark.slow)])
def test_deterministic_backward_is_bit_equal(row: str, emulated: Any) -> None:  # noqa: F811
    """Plain scores take another kernel for dQ where determinism is asked for."""
    emulated()
    config = next(c for c in configs_for("sdpa_backward", "cpu") if c.name == row)
    result = run_config(dataclasses.replace(config, deterministic=True), NAME, "cpu")
    assert result.verdict == "pass", result.detail


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_copies_that_land_early_change_nothing(emulated: Any) -> None:  # noqa: F811
    """An asynchronous copy may land at any time up to its wait: nobody still reads what it overwrites."""
    emulated((8, 6), lazy=False)
    config = next(c for c in configs_for("sdpa", "cpu") if c.name == "bf16-d192-dv128")
    assert run_config(config, NAME, "cpu").verdict == "pass"
