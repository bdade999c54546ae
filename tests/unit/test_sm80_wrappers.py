"""The SM80 engine's wrappers, on emulated kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm80_emulator import EmulatedKernel, needs_compiler

import frost
from engines.base import Decline, Target
from engines.reference.sdpa import sdpa_backward, sdpa_forward
from engines.sm80 import adapter_bwd, adapter_fwd, wrappers
from engines.sm80.wrappers import sdpa_bwd_wrapper_sm80, sdpa_fwd_wrapper_sm80

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (adapter_fwd, adapter_bwd):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    monkeypatch.setattr(wrappers, "_target", lambda t: Target.cuda((9, 0)))
    monkeypatch.setattr(type(wrappers.ENGINE), "unavailable", lambda self, target: None)
    kept = (wrappers._forward, wrappers._backward)
    for cache in kept:
        cache.cache_clear()
    yield
    for cache in kept:
        cache.cache_clear()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=2e-2, atol=2e-2)


def test_dense_with_every_gradient() -> None:
    q, k, v, do = randn(1, 2, 20, 64), randn(1, 1, 40, 64), randn(1, 1, 40, 64), randn(1, 2, 20, 64).flip(2)
    bias, sink = randn(2, 1, 40, dtype=torch.float32), randn(2, dtype=torch.float32)
    o, lse = sdpa_fwd_wrapper_sm80(q, k, v, bias=bias, sink=sink, causal=True, align="bottom_right")
    wide = {"bias": bias.double(), "sink": sink.double(), "causal": True, "align_bottom_right": True}
    o64, lse64 = sdpa_forward(q.double(), k.double(), v.double(), **wide)
    close(o, o64)
    close(lse, lse64)
    grads = sdpa_bwd_wrapper_sm80(q, k, v, o, do, lse, dbias=True, dsink=True, bias=bias, sink=sink, causal=True,
                                  align="bottom_right")
    expected = sdpa_backward(q.double(), k.double(), v.double(), o64, do.double(), lse64,
                             want=("dq", "dk", "dv", "dbias", "dsink"), **wide)
    for got, ref in zip(grads, expected, strict=True):
        close(got, ref)
    assert grads.dbias.shape == bias.shape and grads.dbias.dtype == torch.float32


def test_packed_with_some_gradients() -> None:
    q, k = randn(50, 2, 40), randn(60, 1, 40)
    cu_q, cu_kv = torch.tensor([0, 20, 20, 50], dtype=torch.int32), torch.tensor([0, 33, 40, 60])
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    o, lse = sdpa_fwd_wrapper_sm80(q, k, k, **options)
    o64, lse64 = sdpa_forward(q.double(), k.double(), k.double(), **options)
    close(o, o64)
    grads = sdpa_bwd_wrapper_sm80(q, k, k, o, o, lse, grads=("k",), **options)
    assert grads.dq is None and grads.dv is None and grads.dsink is None
    close(grads.dk, sdpa_backward(q.double(), k.double(), k.double(), o64, o.double(), lse64, want=("dk",), **options)[1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_is_the_callers_choice(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain scores dQ is summed by atomic additions unless fixed orders are asked for."""
    q, k = randn(1, 2, 20, 64), randn(1, 1, 40, 64)
    o, lse = sdpa_fwd_wrapper_sm80(q, k, k)
    made = []
    real = wrappers.backward_params
    monkeypatch.setattr(wrappers, "backward_params", lambda *args: made.append(real(*args)) or made[-1])
    grads = sdpa_bwd_wrapper_sm80(q, k, k, o, o, lse, deterministic=deterministic)
    assert ("cast" in made[0]) != deterministic and ("dq" in made[0]) == deterministic
    close(grads.dq, sdpa_backward(*(x.double() for x in (q, k, k, o, o, lse)), want=("dq",))[0])


@pytest.mark.parametrize("options", [{"softcap": -3.0}, {"causal": True, "window": (None, 7)}, {"align": "bottom-right"},
                                     {"window": (-5, None)}, {"window": 3}, {"scale": float("nan")}, {"causal": 1}], ids=str)
def test_options_mean_what_they_mean_elsewhere(options: dict[str, Any]) -> None:
    q = randn(1, 1, 8, 64)
    with pytest.raises(ValueError, match="given .*, expected"):
        sdpa_fwd_wrapper_sm80(q, q, q, **options)
    with pytest.raises(ValueError):
        frost.attention(q, q, q, **options)


def test_a_softcap_of_zero_is_off() -> None:
    q = randn(1, 1, 8, 64)
    assert torch.equal(sdpa_fwd_wrapper_sm80(q, q, q, softcap=0.0)[0], sdpa_fwd_wrapper_sm80(q, q, q)[0])


def test_what_does_not_fit_is_refused() -> None:
    q, k = randn(1, 4, 8, 64), randn(1, 2, 9, 64)
    for make, name in ((lambda: sdpa_fwd_wrapper_sm80(q, k, k[:, :, :8]), "v"),
                       (lambda: sdpa_fwd_wrapper_sm80(q, randn(1, 3, 9, 64), randn(1, 3, 9, 64)), "heads"),
                       (lambda: sdpa_fwd_wrapper_sm80(q, k, k, sink=randn(3)), "sink"),
                       (lambda: sdpa_fwd_wrapper_sm80(q, k, k, bias=randn(5, 9)), "bias"),
                       (lambda: sdpa_fwd_wrapper_sm80(q, k, k, seq_len_q=torch.zeros(2, dtype=torch.int32)), "seq_len_q"),
                       (lambda: sdpa_bwd_wrapper_sm80(q, k, k, q, q, q[..., 0].float(), dsink=True), "sink"),
                       (lambda: sdpa_bwd_wrapper_sm80(q, k, k, q, q[:, :2], q[..., 0].float()), "do"),
                       (lambda: sdpa_bwd_wrapper_sm80(q, k, k, q, q.float(), q[..., 0].float()), "do: given torch.float32"),
                       (lambda: sdpa_bwd_wrapper_sm80(q, k, k, q, q, q[..., 0]), "lse: given torch.bfloat16"),
                       (lambda: sdpa_bwd_wrapper_sm80(q, k, k, q.to("meta"), q, q[..., 0].float()), "o: given .* on meta")):
        with pytest.raises(ValueError, match=name):
            make()
    with pytest.raises(TypeError, match="dropout"):
        sdpa_fwd_wrapper_sm80(q, k, k, dropout=0.1)
    with pytest.raises(Decline, match="dtype"):
        sdpa_fwd_wrapper_sm80(q.float(), k.float(), k.float())
