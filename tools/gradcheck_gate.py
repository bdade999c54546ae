"""The gradient gate: an engine's kernels against autograd through the reference, over a matrix of configurations.

    python -m tools.gradcheck_gate                             Triton's selection attention, forward and backward
    python -m tools.gradcheck_gate --device cpu --small        a few configurations in Triton's interpreter
    python -m tools.gradcheck_gate --engine triton --op sdpa   any other engine's and op's gate matrix

One row per configuration with the largest error of O, dQ, dK and dV and PASS or FAIL, then a green or a red line; exit code
0 or 1, 2 for arguments that mean nothing. On green the equivalence gates are written (--out, else the user's own folder).
A configuration of selection attention has to keep within 2e-3 in fp32, 6e-2 * (1 + |reference|) in 16 bits, and the
library's tolerance rule, whose floor tells true fp32 products from TF32.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from engines import registry
from engines.reference.nsa import selection_forward_reference
from frost import gates, nsa
from frost.equivalence import ConfigResult, GateRun, compare, gated_ops, run_config, run_gate
from frost.equivalence_nsa import nsa_answers, nsa_operands
from frost.errors import GateError, NotSupportedError
from frost.gate_matrix_nsa import CONFIGS, NSA_MATRIX, NsaConfig, make_block_idx

__all__ = ["CONFIGS", "check_config", "main", "make_block_idx"]

_FORWARD, _BACKWARD = "nsa_selection", "nsa_selection_backward"
_NAMES = ("o", "dq", "dk", "dv")
_FP32_LIMIT, _LOW_LIMIT = 2e-3, 6e-2


@dataclass(frozen=True)
class Row:
    """One configuration: the largest errors of O, dQ, dK, dV, and what is wrong ("" where nothing is)."""

    name: str
    errors: dict[str, float]
    share: float          # of what the tolerance rule allows, over all results
    problem: str


def check_config(config: NsaConfig, engine: str = "triton", device: torch.device | str = "cpu") -> Row:
    """Run one configuration through `frost.nsa.selection_attn` and autograd, and hold it to autograd through
    `selection_forward_reference` in fp64."""
    c = replace(config, op=_BACKWARD)
    operands = nsa_operands(c)
    clean = {n: torch.nan_to_num(x) if x.is_floating_point() else x for n, x in operands.items()}
    wide = _gradients(c, {n: x.double() if x.is_floating_point() else x for n, x in clean.items()},
                      selection_forward_reference)
    on_device = {n: x.to(device) for n, x in clean.items()}
    got = _gradients(c, on_device, nsa.selection_attn, engines=[engine], gates="off")
    answer, plain = nsa_answers(c, operands)
    errors, problems, worst = {}, [], 0.0
    for name in (*_NAMES, "lse"):
        result, ref = got[name].cpu(), wide[name].cpu()
        seen = compare(name, result, ref, plain[name], answer["lse"])
        worst = max(worst, seen.ratio)
        if name in _NAMES:
            errors[name] = seen.max_error
        if not seen.ratio <= 1:
            problems.append(f"{name}: {seen.ratio:.3g} x the allowed error")
        beyond = _beyond(result, ref, c.dtype)
        if beyond:
            problems.append(f"{name}: {beyond}")
    return Row(config.name, errors, worst, "; ".join(problems))


def _gradients(c: NsaConfig, x: dict[str, Tensor], attention: Callable[..., Any], **how: Any) -> dict[str, Tensor]:
    q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
    o, lse = attention(q, k, v, x["block_indices"], c.block_size, block_counts=x.get("block_counts"), scale=c.scale,
                       cu_seqlens=x.get("cu_seqlens"), return_lse=True, **how)
    loss = (o * x["do"]).sum()
    if c.dlse:
        loss = loss + torch.where(torch.isfinite(lse), lse * x["dlse"], 0.0).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads))}


def _beyond(got: Tensor, ref: Tensor, dtype: str) -> str:
    limit = torch.full_like(ref, _FP32_LIMIT) if dtype == "fp32" else _LOW_LIMIT * (1 + ref.abs())
    same = got.double() == ref
    error = torch.where(same, 0.0, (got.double() - ref).abs())
    wrong = ~(error <= limit) & ~same
    return f"{int(wrong.sum())} elements beyond {'2e-3' if dtype == 'fp32' else '6e-2 * (1 + |ref|)'}" if wrong.any() else ""


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(width=150, soft_wrap=True)
    try:
        registry.get(args.engine)
        target = gates.target_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, GateError) as e:
        print(f"gradcheck_gate: {e}", file=sys.stderr)
        return 2
    if args.op not in gated_ops():
        print(f"gradcheck_gate: --op: given {args.op!r}, expected one of {', '.join(gated_ops())}", file=sys.stderr)
        return 2
    partial = bool(args.only) or args.small
    run = _run_selection if args.op in NSA_MATRIX else _run_matrix
    ok, runs = run(args, target, console)
    if ok and not partial and not args.no_artifact:
        try:
            for made in runs:
                console.print(f"written to {gates.keep(made, args.out)}", highlight=False)
        except GateError as e:
            console.print(str(e), style="red", highlight=False)
            ok = False
    what = f"{args.engine}:{args.op} on {target}"
    said = f"GREEN {what}: every configuration holds" if ok else f"RED {what}: something does not hold"
    if ok and partial:
        said += " (of a part of the matrix: no gate was written)"
    console.print(said, style="green" if ok else "red", highlight=False)
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.gradcheck_gate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="triton")
    parser.add_argument("--op", default=_FORWARD, help=f"{_FORWARD} (both directions) or any op with a gate matrix")
    parser.add_argument("--device", help="cpu (the interpreter), cuda or cuda:<index>; a GPU where there is one")
    parser.add_argument("--only", action="append", help="configurations whose name contains this; may be repeated")
    parser.add_argument("--small", action="store_true", help="a handful of configurations")
    parser.add_argument("--out", type=Path, help="folder for the artifacts (default: your own gate folder)")
    parser.add_argument("--no-artifact", action="store_true", help="write nothing")
    return parser


_SMALL = ("fp32-g1", "fp32-hostile", "bf16-d40-dv24", "one-token", "packed-block-16", "more-queries")


def _wanted(args: argparse.Namespace, name: str) -> bool:
    if args.small and name not in _SMALL:
        return False
    return not args.only or any(part in name for part in args.only)


def _run_selection(args: argparse.Namespace, target: Any, console: Console) -> tuple[bool, list[GateRun]]:
    """Autograd against autograd, then both ops' gate matrices (poison, layouts, canaries, determinism)."""
    device = target.device if target.device == "cpu" else f"{target.device}:{target.index}"
    good = True
    results: dict[str, list[ConfigResult]] = {op: [] for op in (_FORWARD, _BACKWARD)}
    console.print(f"{'configuration':<28}{'O':>10}{'dQ':>10}{'dK':>10}{'dV':>10}{'share':>8}", highlight=False)
    chosen = [c for c in CONFIGS if target.device in c.devices and _wanted(args, c.name)]
    for config in chosen:
        row = _checked(config, args.engine, device)
        for op in (_FORWARD, _BACKWARD):
            results[op].append(run_config(_of(op, config), args.engine, device))
            last = results[op][-1]
            if last.verdict != "pass":
                row = replace(row, problem=f"{row.problem}; {op}: {last.verdict} {last.detail}".strip("; "))
            row = replace(row, share=max(row.share, last.ratio))
        good = good and not row.problem
        _print(row, console)
    for config in (c for c in NSA_MATRIX[_BACKWARD] if target.device in c.devices and _wanted(args, c.name)):
        if config.name in {c.name for c in chosen}:
            continue
        found = run_config(config, args.engine, device)
        results[_BACKWARD].append(found)
        good = good and found.verdict == "pass"
        _print(Row(config.name, {n: e.max_error for n, e in found.errors.items()}, found.ratio,
                   "" if found.verdict == "pass" else f"{found.verdict} {found.detail}"), console)
    return good and bool(chosen), [GateRun(args.engine, op, target, tuple(rows)) for op, rows in results.items()]


def _of(op: str, config: NsaConfig) -> NsaConfig:
    return next(c for c in NSA_MATRIX[op] if c.name == config.name)


def _checked(config: NsaConfig, engine: str, device: str) -> Row:
    try:
        return check_config(config, engine, device)
    except NotSupportedError as e:
        return Row(config.name, {}, math.inf, f"declined: {e}")
    except Exception as e:
        return Row(config.name, {}, math.inf, f"{type(e).__name__}: {e}")


def _print(row: Row, console: Console) -> None:
    numbers = "".join(f"{row.errors[n]:>10.1e}" if n in row.errors else f"{'-':>10}" for n in _NAMES)
    verdict = f"FAIL  {row.problem}" if row.problem else "PASS"
    console.print(f"{row.name:<28}{numbers}{row.share:>8.2f}  {verdict}", style="red" if row.problem else None,
                  highlight=False)


def _run_matrix(args: argparse.Namespace, target: Any, console: Console) -> tuple[bool, list[GateRun]]:
    """Another op's gate matrix."""
    def show(result: ConfigResult) -> None:
        problem = f"{result.verdict} {result.detail}" if result.verdict in ("fail", "error") else ""
        errors = {n: e.max_error for n, e in result.errors.items()}
        if result.verdict == "declined":
            console.print(f"{result.name:<28}declined: {result.detail}", highlight=False)
        else:
            _print(Row(result.name, errors, result.ratio, problem), console)

    if args.only or args.small:
        from frost.equivalence import configs_for

        device = target.device if target.device == "cpu" else f"{target.device}:{target.index}"
        rows = [c for c in configs_for(args.op, target.device) if not args.only or any(p in c.name for p in args.only)]
        found = []
        for config in rows[:6] if args.small and not args.only else rows:
            found.append(run_config(config, args.engine, device))
            show(found[-1])
        made = GateRun(args.engine, args.op, target, tuple(found))
    else:
        made = run_gate(args.engine, args.op, target, show)
    return made.ok, [made]


if __name__ == "__main__":
    sys.exit(main())
