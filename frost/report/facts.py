"""Plans, gates, routing dumps and benchmarks as plain data: what a report shows and a saved run keeps."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from descriptors import LIMITS, WireError
from descriptors.limits import check_count, read_limited, shown

from .. import backend_bench, gates, routing
from .._version import __version__
from ..draw import _labels
from ..plan_key import key_text
from ..sdpa_baseline import SHAPE, load_sdpa_baseline, sdpa_baseline_info
from .saved import SavedError

if TYPE_CHECKING:
    from ..graph import Graph
    from ..plan import Plan

Facts = dict[str, Any]
Bar = Callable[[int], Any]


def environment() -> dict[str, str]:
    """Versions, and the card where there is one."""
    found = {
        "frost": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    try:
        import triton

        found["triton"] = str(triton.__version__)
    except ImportError:
        found["triton"] = "none"
    found["card"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found


# ---- plans -----------------------------------------------------------------------------------------------


def plan_facts(graph: Graph, plan: Plan) -> Facts:
    """The graph's drawing, routes with every decline, steps, and the workspace map of one plan."""
    nodes, edges = _drawn(graph, {r.node: r.engine for r in plan.routes})
    steps = []
    for step, route, core in zip(plan.program.steps, plan.routes, plan._core.steps):
        steps.append(
            {
                "name": step.name,
                "op": route.op,
                "engine": route.engine,
                "gate": route.gate,
                "details": {str(k): str(v) for k, v in core.executable.describe().items()},
            }
        )
    regions = [
        {"name": name, "offset": offset, "bytes": nbytes, "first": first, "last": last}
        for name, offset, nbytes, first, last in plan.workspace_map()
    ]
    return {
        "name": graph.name,
        "target": str(plan.target),
        "key": key_text(plan.key),
        "cache_hit": plan.cache_hit,
        "nodes": nodes,
        "edges": edges,
        "routes": [r.to_wire() for r in plan.routes],
        "steps": steps,
        "workspace": {"bytes": plan.workspace_size, "regions": regions},
    }


def _drawn(graph: Graph, engines: dict[str, str]) -> tuple[list[Facts], list[list[Any]]]:
    tensors = [*graph.inputs, *(t for n in graph.ops for t in n.outputs.values())]
    ids: dict[Any, int] = {x: i for i, x in enumerate([*tensors, *graph.ops])}
    outputs: dict[Any, list[str]] = {}
    for out in graph.outputs:
        outputs.setdefault(out.tensor, []).append(str(out.name))
    nodes: list[Facts] = []
    for t in tensors:
        other = [n for n in outputs.get(t, ()) if n != t.name]
        nodes.append(
            {
                "id": ids[t],
                "kind": "input" if t.is_input else "output" if t in outputs else "tensor",
                "label": f"{t.name} → {', '.join(other)}" if other else str(t.name),
                "lines": [str(t.desc)],
            }
        )
    edges: list[list[Any]] = []
    for node in graph.ops:
        engine = engines.get(node.name)
        nodes.append(
            {
                "id": ids[node],
                "kind": "op",
                "label": node.name,
                "lines": [*_labels(node), *([f"→ {engine}"] if engine else [])],
            }
        )
        edges += [[ids[t], ids[node], field] for field, t in node.inputs.items() if t in ids]
        edges += [[ids[node], ids[t], field] for field, t in node.outputs.items()]
    return nodes, edges


# ---- gates and routing -----------------------------------------------------------------------------------


def gate_facts(gate_dir: str | Path | None = None) -> list[Facts]:
    """Every gate that lowering would look at, in its order, with what speaks against it today."""
    out = []
    for file in gates.iter_gates(gate_dir):
        g = file.gate
        if g is None:
            out.append(
                {
                    "name": file.path.name,
                    "engine": "",
                    "op": "",
                    "verdict": "damaged",
                    "environment": "",
                    "date": "",
                    "covers": 0,
                    "declined": 0,
                    "shipped": file.shipped,
                    "problem": file.problem,
                }
            )
            continue
        out.append(
            {
                "name": file.path.name,
                "engine": g.engine,
                "op": g.op,
                "verdict": g.verdict,
                "date": g.date[:10],
                "environment": ", ".join(f"{k} {v}" for k, v in sorted(g.environment.items())),
                "covers": len(g.shapes_covered),
                "declined": len(g.declined),
                "shipped": file.shipped,
                "problem": gates._shipped_problem(g),
            }
        )
    return out


def routing_facts(paths: Iterable[Path]) -> list[Facts]:
    """One item per dump. Raises routing.RoutingError and OSError."""
    out = []
    for path in paths:
        dump = routing.load(path)
        out.append(
            {
                "suite": dump.suite or path.stem,
                "counts": dict(dump.stats),
                "cache_hits": dump.stats.cache_hits,
                "shares": routing.shares(dump.stats),
                "declines": dump.stats.declines,
                "texts": dump.stats.texts,
            }
        )
    return out


# ---- benchmarks ------------------------------------------------------------------------------------------


def ceilings(card: str, dtype: str, flops: float, nbytes: float) -> list[Facts]:
    """What no kernel can pass on the card for a problem of so many operations over so many bytes of
    operands; [] for a card that was never measured.
    """
    table = json.loads((Path(__file__).parent.parent / "data" / "ceilings.json").read_text())["cards"]
    found = table.get(card)
    if found is None:
        return []
    out = [
        {"label": c["label"], "tflops": max(c["tflops"]), "low": min(c["tflops"])}
        for c in found["compute"]
        if dtype in c["dtypes"]
    ]
    memory = found["memory"]
    bound = flops / nbytes * memory["tbps"] if nbytes else math.inf
    return [*out, {"label": f"{memory['label']}: {memory['tbps']} TB/s", "tflops": bound, "low": bound}]


_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def bench_facts(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    iters: int,
    device: str | None,
    dtype: str | None,
    progress: Bar | None = None,
) -> Facts:
    """One causal forward on every backend. Raises ValueError for sizes that mean nothing."""
    sizes = (batch, seq, heads, kv_heads, head_dim, iters)
    if progress is None:
        ms, reasons = backend_bench.benchmark_backends_with_reasons(*sizes, device=device, dtype=dtype)
    else:
        with progress(len(backend_bench._candidate_names())) as step:
            ms, reasons = backend_bench.benchmark_backends_with_reasons(
                *sizes, device=device, dtype=dtype, progress=step
            )
    where = backend_bench.resolve(device)
    on_cuda = where.target is not None and where.target.device == "cuda"
    card = torch.cuda.get_device_name(where.target.index) if on_cuda and where.target is not None else "CPU"
    word = _DTYPE_NAMES[backend_bench._dtype(dtype, torch.device("cuda" if on_cuda else "cpu"))]
    flops = 2.0 * batch * heads * seq * seq * head_dim
    nbytes = 2.0 * batch * (heads + kv_heads) * seq * head_dim * (4 if word == "fp32" else 2)
    pinned = _pinned(
        card,
        {"batch": batch, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "dtype": word},
        seq,
    )
    rows = [
        {
            "candidate": name,
            "ms": t,
            "tflops": flops / (t * 1e-3) / 1e12,
            "status": reasons[name],
            "pinned_ms": pinned.get(name),
            "note": "Triton's interpreter" if name == "frost[triton]" and not on_cuda else "",
        }
        for name, t in ms.items()
    ]
    return {
        "title": f"b{batch} h{heads}/{kv_heads} s{seq} d{head_dim} causal {word} forward, {card}",
        "card": card,
        "dtype": word,
        "rows": rows,
        "ceilings": ceilings(card, word, flops, nbytes),
    }


def _pinned(card: str, shape: Facts, seq: int) -> dict[str, float]:
    """The shipped baseline of this card and shape."""
    try:
        if sdpa_baseline_info()["card"] != card or any(SHAPE[k] != v for k, v in shape.items()):
            return {}
        return load_sdpa_baseline().get(str(seq), {})
    except (OSError, ValueError):
        return {}


def baseline_facts() -> list[Facts]:
    """The shipped baseline as benchmarks; [] where none is installed."""
    try:
        table, info = load_sdpa_baseline(), sdpa_baseline_info()
    except (OSError, ValueError):
        return []
    out = []
    for seq, row in table.items():
        s, (b, hq, hk, d) = int(seq), (SHAPE[n] for n in ("batch", "n_heads", "n_kv_heads", "head_dim"))
        flops = 2.0 * b * hq * s * s * d
        nbytes = 2.0 * b * (hq + hk) * s * d * 2
        rows = [
            {
                "candidate": n,
                "ms": t,
                "tflops": flops / (t * 1e-3) / 1e12,
                "pinned_ms": t,
                "status": "no kernel for this" if math.isnan(t) else "ok",
            }
            for n, t in row.items()
        ]
        out.append(
            {
                "title": f"pinned baseline: b{b} h{hq}/{hk} s{s} d{d} causal bf16 forward, "
                f"{info['card']}, torch {info['torch']}",
                "card": info["card"],
                "dtype": "bf16",
                "rows": rows,
                "ceilings": ceilings(info["card"], "bf16", flops, nbytes),
            }
        )
    return out


def csv_facts(path: Path) -> list[Facts]:
    """The cases of a CSV that `python -m tools.bench --csv` wrote, one benchmark per case and direction.
    Raises SavedError (a ValueError) naming the file for anything else, and OSError.
    """
    try:
        lines = [line for line in _csv_lines(path) if line["suite"] != "host"]
    except (WireError, UnicodeDecodeError, csv.Error) as e:
        raise SavedError(f"{path}: {e}") from e
    cases: dict[tuple[str, str, str], Facts] = {}
    for line in lines:
        key = (line["suite"], line["case"], line["direction"])
        case = cases.setdefault(
            key,
            {
                "title": f"{line['case']} {line['direction']}, {line['dtype']}, {line['card']}",
                "card": line["card"],
                "dtype": line["dtype"],
                "rows": [],
                "ceilings": [
                    c for c in ceilings(line["card"], line["dtype"], 1.0, 0.0) if math.isfinite(c["tflops"])
                ],
            },
        )
        case["rows"].append(
            {
                "candidate": line["candidate"],
                "ms": _number(line["ms"], path),
                "tflops": _number(line["tflops"], path),
                "pinned_ms": None,
                "status": "ok" if line["status"] == "ok" else f"{line['status']}: {line['check']}",
            }
        )
    return list(cases.values())


_CSV_COLUMNS = frozenset(
    ("suite", "case", "direction", "candidate", "status", "ms", "tflops", "check", "card", "dtype")
)


def _csv_lines(path: Path) -> list[dict[str, str]]:
    """Raises SavedError, WireError, UnicodeDecodeError or csv.Error."""
    limits = LIMITS["benchmark CSV"]
    text = read_limited(path, limits).decode()
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    names = list(reader.fieldnames or ())
    check_count("columns", len(names), limits)
    if not _CSV_COLUMNS <= set(names):
        missing = sorted(_CSV_COLUMNS - set(names))
        raise SavedError(f"{path}: expected the columns of `python -m tools.bench --csv`, it lacks {missing}")
    lines = []
    for line in reader:
        if None in line or None in line.values():
            raise SavedError(f"{path}: line {reader.line_num}: expected {len(names)} columns")
        if max(map(len, line.values())) > limits.max_text:
            raise SavedError(f"{path}: line {reader.line_num}: expected texts of at most {limits.max_text} characters")
        lines.append(line)
        check_count("rows", len(lines), limits)
        if len(lines) * len(names) > limits.max_values:
            raise SavedError(f"{path}: given more than {limits.max_values} values")
    return lines


def _number(text: str, path: Path) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise SavedError(f"{path}: given {shown(text)}, expected a number or nothing") from None
