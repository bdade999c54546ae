"""Drawings of a graph: graphviz' language, SVG through `dot`, and a tree of text."""

from __future__ import annotations

import shutil
import subprocess

from frost.errors import NotSupportedError
from frost.graph import Graph, OpNode, Tensor
from frost.opset import OPS

_DOT_TIMEOUT_S = 60
_MOST_INDENT = 60  # a chain of ops is as deep as it is long: its text grows with its length, not with the square


def to_dot(graph: Graph) -> str:
    """Ops as boxes, tensors as ellipses (inputs and outputs bold), edges labelled with the field names."""
    tensors = [*graph.inputs, *(t for n in graph.ops for t in n.outputs.values())]
    ids: dict[object, str] = {x: f"n{i}" for i, x in enumerate([*tensors, *graph.ops])}
    outputs: dict[Tensor, list[str]] = {}
    for out in graph.outputs:
        outputs.setdefault(out.tensor, []).append(str(out.name))
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB;"]
    for t in tensors:
        style = ", style=bold" if t.is_input or t in outputs else ""
        named = f"{t.name} → {', '.join(outputs[t])}" if t in outputs else str(t.name)
        lines.append(f"  {ids[t]} [label={_quoted(named, str(t.desc))}{style}];")
    for node in graph.ops:
        lines.append(f"  {ids[node]} [shape=box, label={_quoted(node.name, *_labels(node))}];")
        known = [(f, t) for f, t in node.inputs.items() if t in ids]
        lines += [f"  {ids[t]} -> {ids[node]} [label={_quoted(f)}];" for f, t in known]
        lines += [f"  {ids[node]} -> {ids[t]} [label={_quoted(f)}];" for f, t in node.outputs.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(*lines: str) -> str:
    return '"' + "\\n".join(str(x).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for x in lines) + '"'


def _labels(node: OpNode) -> list[str]:
    """The op where the name does not say it, and the options that differ from their defaults."""
    options = ", ".join(_options(node))
    return [*([node.op] if node.op != node.name else []), *([options] if options else [])]


def _options(node: OpNode) -> list[str]:
    defaults = OPS[node.op].attrs
    return [f"{name}={value}" for name, value in node.attrs.items() if value != defaults[name]]


def to_svg(graph: Graph) -> str:
    """Raises NotSupportedError where graphviz is missing or fails."""
    dot = shutil.which("dot")
    if dot is None:
        raise NotSupportedError("to_svg: given no `dot` on the PATH, expected graphviz; install it, or use to_dot() or "
                                "to_text()")
    try:
        run = subprocess.run([dot, "-Tsvg"], check=False, input=to_dot(graph), capture_output=True, text=True,
                             encoding="utf-8", timeout=_DOT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotSupportedError(f"to_svg: `dot` took more than {_DOT_TIMEOUT_S} s; use to_dot() or to_text()") from None
    if run.returncode:
        raise NotSupportedError(f"to_svg: `dot` failed: {run.stderr.strip()[:500]}")
    return run.stdout


def to_text(graph: Graph) -> str:
    """From the outputs down; what was shown before is only named."""
    lines = [f"graph {graph.name}"]
    shown: set[OpNode] = set()
    # Explicit stack: graphs may be deeper than Python's recursion limit.
    stack: list[tuple[int, str, Tensor]] = [(1, f"{out.name} = ", out.tensor) for out in reversed(graph.outputs)]
    if not stack:
        lines.append("  (no outputs)")
    while stack:
        depth, label, t = stack.pop()
        node = t.producer
        line = "  " * min(depth, _MOST_INDENT) + label
        if node is None:
            lines.append(f"{line}{t.name}: {t.desc}")
        elif node in shown:
            lines.append(f"{line}{t.name}: {t.desc} (of {node.name}, above)")
        else:
            shown.add(node)
            options = "".join(f", {o}" for o in _options(node))
            lines.append(f"{line}{t.name}: {t.desc} <- {node.op}{options}")
            stack += [(depth + 1, f"{f}: ", operand) for f, operand in reversed(node.inputs.items())]
    return "\n".join(lines)
