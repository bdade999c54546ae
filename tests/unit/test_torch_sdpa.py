"""What PyTorch's attention is trusted with, which backend serves it, and that the CPU one is right in any layout."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import layouts
import pytest
import torch
from compare import assert_answer
from oracle import Problem
from torch import Tensor

from descriptors import MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from engines.base import API_TYPES, Launch, SdpaBwdDsl, SdpaFwdDsl, Target, Workspace
from engines.torch_sdpa import ENGINE

CPU = Target.cpu()
HOPPER, ADA = Target.cuda((9, 0)), Target.cuda((8, 9))


def forward_desc(*, b: int = 2, hq: int = 8, hk: int = 8, sq: int = 128, sk: int = 128, d: int = 64,
                 dv: int | None = None, dtype: str = "bf16", lse: bool = True, **fields: Any) -> SdpaDesc:
    dv = d if dv is None else dv
    q, o = TensorDesc.make((b, hq, sq, d), dtype), TensorDesc.make((b, hq, sq, dv), dtype)
    k, v = TensorDesc.make((b, hk, sk, d), dtype), TensorDesc.make((b, hk, sk, dv), dtype)
    stats = TensorDesc.make((b, hq, sq), "fp64" if dtype == "fp64" else "fp32") if lse else None
    return SdpaDesc(**{"q": q, "k": k, "v": v, "o": o, "lse": stats, **fields})


def backward_desc(**sizes: Any) -> SdpaBwdDesc:
    grads = {name: sizes.pop(name) for name in ("dbias", "dsink", "dlse", "deterministic") if name in sizes}
    fwd = forward_desc(**sizes)
    operands = {f.name: getattr(fwd, f.name) for f in dataclasses.fields(fwd)}
    return SdpaBwdDesc(**operands, do=fwd.o, dq=fwd.q, dk=fwd.k, dv=fwd.v, **grads)


CAUSAL = MaskDesc(causal=True)
BOTTOM_RIGHT = MaskDesc(causal=True, align="bottom_right")

SERVED: list[tuple[str, Target, dict[str, Any], str, str]] = [
    ("half_hopper", HOPPER, {}, "CUDNN_ATTENTION", "CUDNN_ATTENTION"),
    ("causal", HOPPER, {"band": CAUSAL}, "CUDNN_ATTENTION", "CUDNN_ATTENTION"),
    ("square_bottom_right", HOPPER, {"band": BOTTOM_RIGHT}, "CUDNN_ATTENTION", "CUDNN_ATTENTION"),
    ("gqa", HOPPER, {"hk": 2}, "CUDNN_ATTENTION", "CUDNN_ATTENTION"),
    ("one_key", HOPPER, {"sk": 1}, "FLASH_ATTENTION", "FLASH_ATTENTION"),
    ("d192", HOPPER, {"d": 192}, "FLASH_ATTENTION", "FLASH_ATTENTION"),
    ("d256_hopper", HOPPER, {"d": 256}, "CUDNN_ATTENTION", "CUDNN_ATTENTION"),
    ("d256_ada", ADA, {"d": 256}, "FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
    ("two_head_dims", HOPPER, {"d": 128, "dv": 64}, "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
    ("more_rows_than_keys", HOPPER, {"band": CAUSAL, "sq": 256}, "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
    ("cpu_fp32", CPU, {"dtype": "fp32", "band": CAUSAL, "hk": 2}, "FLASH_ATTENTION", "FLASH_ATTENTION"),
    ("cpu_fp64", CPU, {"dtype": "fp64", "d": 7}, "FLASH_ATTENTION", "FLASH_ATTENTION"),
]

_BIAS = TensorDesc.make((1, 1, 128, 128), "bf16")
_MASK = TensorDesc.make((1, 1, 128, 128), "bool")
_LENGTHS = TensorDesc.make((2,), "int32")
_SINK = TensorDesc.make((8,), "fp32")

DECLINED: list[tuple[str, Target, dict[str, Any], str]] = [
    ("fp32_gpu", HOPPER, {"dtype": "fp32"}, "dtype"),
    ("old_arch", Target.cuda((7, 5)), {}, "arch"),
    ("odd_head_dim", HOPPER, {"d": 41}, "head_dim"),
    ("gqa_two_head_dims", HOPPER, {"hk": 2, "d": 128, "dv": 64}, "head_dim_v"),
    ("cpu_two_head_dims", CPU, {"dtype": "fp32", "dv": 32}, "head_dim_v"),
    ("bottom_right_off_square", HOPPER, {"band": BOTTOM_RIGHT, "sq": 64}, "align"),
    ("unseen_keys", CPU, {"dtype": "fp32", "band": CAUSAL, "sq": 64}, "causal"),
    ("window_left", HOPPER, {"band": MaskDesc(causal=True, left=3)}, "window_left"),
    ("window_right", HOPPER, {"band": MaskDesc(right=0)}, "window_right"),
    ("softcap", HOPPER, {"softcap": 2.0}, "softcap"),
    ("bias", HOPPER, {"bias": _BIAS}, "bias"),
    ("mask", HOPPER, {"mask": _MASK}, "mask"),
    ("sink", HOPPER, {"sink": _SINK}, "sink"),
    ("seq_len_q", HOPPER, {"seq_len_q": _LENGTHS}, "seq_len_q"),
    ("seq_len_kv", HOPPER, {"seq_len_kv": _LENGTHS}, "seq_len_kv"),
    ("no_key", CPU, {"dtype": "fp32", "sk": 0}, "seqlen_kv"),
    ("no_row", CPU, {"dtype": "fp32", "sq": 0}, "seqlen_q"),
    ("no_batch", CPU, {"dtype": "fp32", "b": 0}, "batch"),
    ("many_batches", HOPPER, {"b": 65_536}, "batch"),
    ("last_stride", CPU, {"q": TensorDesc.make((2, 8, 128, 64), "bf16", (131072, 16384, 128, 2))}, "q.stride[-1]"),
    ("row_pitch", HOPPER, {"k": TensorDesc.make((2, 8, 128, 64), "bf16", (66560, 8320, 65, 1))}, "k.stride[2]"),
    ("base_alignment", HOPPER, {"v": TensorDesc.make((2, 8, 128, 64), "bf16", alignment=2)}, "v.alignment"),
]


@pytest.mark.parametrize(("target", "sizes", "fwd", "bwd"), [c[1:] for c in SERVED], ids=[c[0] for c in SERVED])
def test_the_route_names_the_backend(target: Target, sizes: dict[str, Any], fwd: str, bwd: str) -> None:
    for desc, backend in ((forward_desc(**sizes), fwd), (backward_desc(**sizes), bwd)):
        adapter = ENGINE.adapter(API_TYPES[type(desc)])
        assert adapter.check_support(desc, target).reasons == ()
        assert adapter.label(desc, target) == f"torch_sdpa[{backend}]"


@pytest.mark.parametrize(("target", "sizes", "name"), [c[1:] for c in DECLINED], ids=[c[0] for c in DECLINED])
def test_a_decline_names_the_field(target: Target, sizes: dict[str, Any], name: str) -> None:
    for desc in (forward_desc(**sizes), backward_desc(**sizes)):
        support = ENGINE.adapter(API_TYPES[type(desc)]).check_support(desc, target)
        assert name in [r.field for r in support.reasons], support.reasons


@pytest.mark.parametrize("name", ["dlse", "deterministic"])
def test_backward_declines_what_the_operators_lack(name: str) -> None:
    desc = backward_desc(**{name: True if name == "deterministic" else TensorDesc.make((2, 8, 128), "fp32")})
    support = ENGINE.adapter(SdpaBwdDsl).check_support(desc, HOPPER)
    assert name in [r.field for r in support.reasons]


def test_a_packed_batch_is_declined() -> None:
    q, cu = TensorDesc.make((100, 8, 64), "bf16"), TensorDesc.make((4,), "int32")
    desc = SdpaDesc(q, q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    fields = [r.field for r in ENGINE.adapter(SdpaFwdDsl).check_support(desc, HOPPER).reasons]
    assert {"cu_seqlens_q", "cu_seqlens_kv"} <= set(fields)


def test_a_plan_for_another_mask_is_refused_not_run() -> None:
    """Window widths are run-time values: an executable that gets one it can't honour says so."""
    desc = forward_desc(dtype="fp32", band=CAUSAL, lse=False)
    executable = ENGINE.adapter(SdpaFwdDsl).compile(desc, CPU)
    other = forward_desc(dtype="fp32", band=MaskDesc(right=3), lse=False)
    with pytest.raises(ValueError, match="mask"):
        executable.prepare(Launch(other, {"q": torch.zeros(1)}), Workspace(None, {}))


def _desc(x: Tensor) -> TensorDesc:
    return TensorDesc.make(x.shape, x.dtype, x.stride(), alignment=x.element_size())


def _run(kind: type, desc: SdpaDesc | SdpaBwdDesc, operands: dict[str, Tensor]) -> bool:
    adapter = ENGINE.adapter(kind)
    if not adapter.check_support(desc, CPU):
        return False
    adapter.execute(adapter.compile(desc, CPU), Launch(desc, operands), Workspace(None, {}))
    return True


@pytest.mark.parametrize("seed", range(40))
def test_cpu_backend_in_any_layout(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    hk, group, b = rng.choice([1, 2]), rng.choice([1, 3]), rng.choice([1, 2])
    sq, d = rng.choice([1, 16, 40, 65]), rng.choice([1, 8, 40, 64])
    sk = rng.choice([sq, 1, 7, 33])
    rows, keys = (b, hk * group, sq, d), (b, hk, sk, d)
    unit = [x for x in layouts.layouts_for(rows) if x.name not in ("last_stride_2", "last_dim_outer")]
    x = {name: layouts.lay_out(torch.randn(shape).to(dtype), rng.choice(layouts.layouts_for(shape) if name == "do" else
                                                                        [u for u in unit if u.applies(shape)]))
         for name, shape in (("q", rows), ("k", keys), ("v", keys), ("do", rows))}
    scale, causal = rng.choice([None, 0.3, -0.5, 0.0]), sq >= sk and rng.random() < 0.5
    problem = Problem(x["q"], x["k"], x["v"], x["do"], None, {"causal": causal, "scale": scale})

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = {"o": rows, "lse": rows[:3], "dq": rows, "dk": keys, "dv": keys}
    outs = {name: layouts.output_like(shape, lse_dtype if name == "lse" else dtype,
                                      rng.choice(layouts.layouts_for(shape, write=True)), name=name)
            for name, shape in shapes.items()}
    got = {name: out.tensor for name, out in outs.items()}
    base = {name: _desc(t) for name, t in (*((n, x[n]) for n in "qkv"), ("o", got["o"]), ("lse", got["lse"]))}
    shared = {**base, "band": MaskDesc(causal=causal), "scale": scale}
    assert _run(SdpaFwdDsl, SdpaDesc(**shared), {**{n: x[n] for n in "qkv"}, "o": got["o"], "lse": got["lse"]})
    backward = SdpaBwdDesc(**shared, do=_desc(x["do"]), **{n: _desc(got[n]) for n in ("dq", "dk", "dv")})
    if not _run(SdpaBwdDsl, backward, {**x, **got}):
        got = {name: got[name] for name in ("o", "lse")}
    layouts.check_canaries(*outs.values())
    assert_answer(got, problem, context=f"seed {seed}")
