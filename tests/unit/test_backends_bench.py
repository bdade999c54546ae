"""Benchmarks: nothing is missing, nothing unusable is a number, nothing wrong is timed; and the pinned
baseline.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from engines import registry
from engines.base import Capabilities, Engine, Executable, Reason, SdpaFwdDsl
from frost import backend_bench, backends, gates, sdpa_baseline
from frost.backends import benchmark_backends, benchmark_backends_with_reasons
from tools import sdpa_baseline as tool

NAMES = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH", "frost[triton]", "frost[sm80]")
SMALL = {"batch": 1, "seq": 24, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "iters": 2, "device": "cpu"}


def make_engine(name, run, reasons=()):
    """An engine whose forward is `run(operands)`; it declines where it is given reasons."""
    calls = []

    class Call(Executable):
        def prepare(self, launch, workspace):
            def call(stream):
                calls.append(name)
                run(launch.operands)

            return call

    class Adapter(SdpaFwdDsl):
        engine = name
        capabilities = (
            Capabilities(
                name,
                "sdpa",
                ("cpu", "cuda"),
                registry.get("reference").adapter(SdpaFwdDsl).capabilities[0].dtypes,
                registry.get("reference").adapter(SdpaFwdDsl).capabilities[0].features,
            ),
        )

        def check_support(self, desc, target):
            from engines.base import Support

            return Support(tuple(reasons))

        def compile(self, desc, target):
            return Call()

    class Fake(Engine):
        def adapters(self):
            return (Adapter(),)

    Fake.name = name
    engine = Fake()
    engine.calls = calls
    return engine


def right(x):
    from engines.reference.sdpa import sdpa_forward

    sdpa_forward(x["q"], x["k"], x["v"], causal=True, out=(x["o"], None))


def half(x):
    """Right where it writes, and it writes every second row only."""
    made = torch.empty_like(x["o"])
    right({**x, "o": made})
    x["o"][:, :, ::2] = made[:, :, ::2]


def test_every_name_is_there_and_unusable_is_nan():
    ms, reasons = benchmark_backends_with_reasons(**SMALL)
    assert tuple(ms) == NAMES == tuple(reasons)
    for name in NAMES:
        assert (ms[name] > 0 and reasons[name] == "ok") or (
            math.isnan(ms[name]) and reasons[name] not in ("", "ok")
        )
    for name in ("FLASH_ATTENTION", "MATH", "frost[triton]"):
        assert reasons[name] == "ok"
    for name in ("CUDNN_ATTENTION", "frost[sm80]"):
        assert math.isnan(ms[name])
    assert tuple(benchmark_backends(**SMALL)) == NAMES


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_the_device_everything_is_nan_with_the_reason():
    ms, reasons = benchmark_backends_with_reasons(**{**SMALL, "device": "cuda"})
    assert all(map(math.isnan, ms.values())) and all("no CUDA device" in r for r in reasons.values())


@pytest.mark.parametrize("dtype", ["bf16", torch.float16])
def test_other_dtypes(dtype):
    _, reasons = benchmark_backends_with_reasons(**SMALL, dtype=dtype)
    assert reasons["MATH"] == reasons["frost[triton]"] == "ok"


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"seq": -1}, {"n_heads": 3}, {"head_dim": 1.5}, {"iters": 0}, {"dtype": "int32"}]
)
def test_sizes_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: given"):
        benchmark_backends(**{**SMALL, **wrong})


def test_the_interpreter_is_not_asked_for_a_models_sizes():
    big = {**SMALL, "seq": 2048, "head_dim": 8}
    ms, reasons = benchmark_backends_with_reasons(**big, only=("frost[triton]",))
    assert math.isnan(ms["frost[triton]"]) and "interpreter" in reasons["frost[triton]"]


def test_a_right_engine_is_timed_and_one_that_writes_half_is_disqualified_first(register):
    """All candidates writing one buffer would hide it: it runs after a right one."""
    good, bad = register(make_engine("a_right_one", right)), register(make_engine("half_of_it", half))
    ms, reasons = benchmark_backends_with_reasons(**SMALL)
    assert tuple(ms)[:6] == NAMES
    assert reasons["frost[a_right_one]"] == "ok" and ms["frost[a_right_one]"] > 0
    assert math.isnan(ms["frost[half_of_it]"]) and reasons["frost[half_of_it]"].startswith("equivalence: ")
    assert "NaN" in reasons["frost[half_of_it]"]
    assert len(good.calls) > 1 and len(bad.calls) == 1  # the check, and no timing


def test_an_engine_that_is_slightly_wrong_is_disqualified(register):
    def off(x):
        right(x)
        x["o"][0, 1, 5] += 3e-3

    bad = register(make_engine("slightly_off", off))
    ms, reasons = benchmark_backends_with_reasons(**SMALL)
    assert math.isnan(ms["frost[slightly_off]"]) and "times the allowed one" in reasons["frost[slightly_off]"]
    assert len(bad.calls) == 1


def test_an_engine_that_ranks_first_and_cannot_serve(register):
    """Its reasons are told, it is never launched, and the automatic route passes it by."""
    engine = register(make_engine("first", right, [Reason("head_dim", "16", "128")]), priority=1)
    ms, reasons = benchmark_backends_with_reasons(**SMALL)
    assert math.isnan(ms["frost[first]"]) and "head_dim: got 16, wanted 128" in reasons["frost[first]"]
    import frost

    q = torch.randn(1, 2, 8, 16)
    frost.routing.reset()
    frost.attention(q, q, q)
    route = frost.routing.routes()[-1]
    assert route.engine_name != "first" and [d.engine for d in route.declined][0] == "first"
    assert not engine.calls
    with pytest.raises(frost.NotSupportedError, match="head_dim: got 16, wanted 128"):
        frost.attention(q, q, q, engines=["first"])


def test_an_engine_that_raises_does_not_hide_the_others(register):
    def breaks(x):
        raise RuntimeError("the kernel is broken")

    register(make_engine("broken", breaks))
    ms, reasons = benchmark_backends_with_reasons(**SMALL)
    assert math.isnan(ms["frost[broken]"]) and "the kernel is broken" in reasons["frost[broken]"]
    assert reasons["MATH"] == "ok"


def test_the_oracle_in_blocks_is_the_oracle_in_one_piece(monkeypatch):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 37, 8, generator=gen) for h in (4, 2, 2))
    whole = backend_bench._Oracle(q, k, v)
    monkeypatch.setattr(backend_bench, "_BLOCK_SCORES", 2 * 37 * 5)
    blocks = backend_bench._Oracle(q, k, v)
    for name in ("exact", "lse"):
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(blocks.plain, whole.plain)


# ---- the pinned baseline ---------------------------------------------------------------------------------

MS = {
    str(s): dict.fromkeys(sdpa_baseline.SDPA_BACKENDS, float(s)) | {"EFFICIENT_ATTENTION": math.nan}
    for s in (512, 1024, 2048)
}
INFO = dict.fromkeys(sdpa_baseline.INFO_FIELDS, "x")


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "data" / "sdpa_baseline.json"
    monkeypatch.setattr(sdpa_baseline, "baseline_path", lambda: path)
    return path


def test_the_baseline_is_reachable_under_both_names():
    assert gates.load_sdpa_baseline is backends.load_sdpa_baseline is sdpa_baseline.load_sdpa_baseline
    assert gates.sdpa_baseline_info is backends.sdpa_baseline_info


def test_a_baseline_round_trip(path):
    sdpa_baseline.write_sdpa_baseline(path, MS, INFO, 20)
    assert "NaN" not in path.read_text()
    table = sdpa_baseline.load_sdpa_baseline()
    assert set(table) == {"512", "1024", "2048"} and math.isnan(table["512"]["EFFICIENT_ATTENTION"])
    assert table["1024"]["MATH"] == 1024.0
    info = sdpa_baseline.sdpa_baseline_info()
    assert info["card"] == "x" and info["batch"] == 4 and info["iters"] == 20


def test_a_missing_or_damaged_baseline_is_told(path):
    with pytest.raises(FileNotFoundError, match=r"python -m tools\.sdpa_baseline"):
        sdpa_baseline.load_sdpa_baseline()
    sdpa_baseline.write_sdpa_baseline(path, MS, INFO, 20)
    whole = json.loads(path.read_text())
    for change in (
        {"schema": 2},
        {"shape": {}},
        {"info": {}},
        {"ms": {}},
        {"ms": {**whole["ms"], "512": {}}},
        {"ms": {**whole["ms"], "512": {**whole["ms"]["512"], "MATH": 0}}},
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(ValueError, match="SDPA baseline"):
            sdpa_baseline.load_sdpa_baseline()
    path.write_text("{")
    with pytest.raises(ValueError, match="SDPA baseline"):
        sdpa_baseline.sdpa_baseline_info()


def test_the_shipped_baseline_is_whole():
    if not sdpa_baseline.baseline_path().exists():
        pytest.skip("no baseline ships yet: `python -m tools.sdpa_baseline` writes it on a GPU")
    table = sdpa_baseline.load_sdpa_baseline()
    assert all(math.isnan(row["EFFICIENT_ATTENTION"]) for row in table.values())
    assert all(row[n] > 0 for row in table.values() for n in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH"))
    assert "H200" in sdpa_baseline.sdpa_baseline_info()["card"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_the_tool_measures_on_a_gpu_only(capsys, tmp_path):
    assert tool.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_tool_writes_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "measure", lambda iters: MS)
    monkeypatch.setattr(tool, "card_info", lambda: INFO)
    monkeypatch.setattr(tool, "why_not", lambda: "")
    out = tmp_path / "x.json"
    assert tool.main(["--out", str(out)]) == 0 and json.loads(out.read_text())["ms"]["2048"]["MATH"] == 2048.0
