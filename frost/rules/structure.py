"""The rules of the graph itself: names, declarations, outputs, and how it hangs together."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from descriptors import Dim, Sym, TensorDesc, dim_max
from descriptors.dims import is_symbolic, symbols
from frost.graph import Graph, Output, Tensor
from frost.rules import Bad, Rule, when


def _names(g: Graph) -> Iterator[Bad]:
    for what, names in (("input", [t.name for t in g.inputs]), ("output", [out.name for out in g.outputs])):
        for name in names:
            yield from when(not isinstance(name, str) or not name, Bad(f"{what} {name!r}", repr(name), "a name"))


def _duplicates(g: Graph) -> Iterator[Bad]:
    seen: dict[str, str] = {}
    named = [*((t.name, "input") for t in g.inputs), *((out.name, "output") for out in g.outputs)]
    for name, kind in named:
        if isinstance(name, str) and name in seen:
            given = f"two {kind}s" if seen[name] == kind else f"an {seen[name]} and an {kind}"
            yield Bad(repr(name), f"{given} of that name", "a name of its own for each")
        elif isinstance(name, str):
            seen[name] = kind


_SHOWN = 20  # nodes of a cycle
# Elements of outputs that do not nest, all together and four times those of one: what exact answers may cost a graph.
_ENUMERATED = 1 << 22


def _negative(dims: tuple[Dim, ...]) -> bool:
    return any(dim_max(d) < 0 for d in dims)


def _extents(g: Graph) -> Iterator[Bad]:
    for t in g.inputs:
        yield from when(_negative(t.shape), Bad(repr(t.name), f"shape {list(t.shape)}", "extents of 0 or more"))


def _strides(g: Graph) -> Iterator[Bad]:
    declared = [*((t.name, t.desc.stride) for t in g.inputs), *((out.name, out.stride) for out in g.outputs)]
    for name, stride in declared:
        yield from when(stride is not None and _negative(stride),
                        Bad(repr(name), f"stride {list(stride or ())}", "strides of 0 or more"))


def _reach(g: Graph) -> Iterator[Bad]:
    for name, desc in (*((t.name, t.desc) for t in g.inputs), *_sound_outputs(g)):
        if not _negative((*desc.shape, *desc.strides)):
            yield from when(desc.nbytes >= 2**63, Bad(repr(name), f"{desc.nbytes} bytes", "less than 2**63 bytes"))


def _sound_outputs(g: Graph) -> Iterator[tuple[str, TensorDesc]]:
    """Outputs whose stride fits their rank."""
    return ((out.name, out.desc) for out in g.outputs if _fits(out))


def _fits(out: Output) -> bool:
    return out.stride is None or len(out.stride) == out.tensor.desc.rank


def _output_stride_count(g: Graph) -> Iterator[Bad]:
    for out in g.outputs:
        yield from when(not _fits(out), Bad(
            repr(out.name), f"{len(out.stride or ())} strides",
            f"{out.tensor.desc.rank} for shape {list(out.tensor.shape)}"))


def _output_overlap(g: Graph) -> Iterator[Bad]:
    left = _ENUMERATED
    for name, desc in _sound_outputs(g):
        sound = not _negative((*desc.shape, *desc.strides)) and desc.nbytes < 2**63
        if desc.stride is None or not sound or desc.nests:
            continue
        most, left = min(_ENUMERATED // 4, left), max(left - desc.numel, 0)
        if desc.overlaps_itself(most):
            yield Bad(repr(name), f"stride {list(desc.stride)} for shape {list(desc.shape)}",
                      "strides under which no two elements share an address")


def _output_alignment(g: Graph) -> Iterator[Bad]:
    for out in g.outputs:
        n = out.alignment
        ok = isinstance(n, int) and not isinstance(n, bool) and n >= 1 and n & (n - 1) == 0
        yield from when(not ok, Bad(repr(out.name), f"alignment {n!r}", "a power of two, in bytes"))


def _no_output(g: Graph) -> Iterator[Bad]:
    yield from when(not g.outputs, Bad("outputs", "none", "at least one"))


def _output_is_input(g: Graph) -> Iterator[Bad]:
    for out in g.outputs:
        if out.tensor.graph is g and out.tensor.is_input:
            yield Bad(repr(out.name), f"the input {out.tensor.name!r}", "the result of an op")


def _foreign(g: Graph) -> Iterator[Bad]:
    uses = [*((t, f"operand {f} of node {n.name!r}") for n in g.ops for f, t in n.inputs.items()),
            *((out.tensor, f"output {out.name!r}") for out in g.outputs)]
    for t, where in uses:
        if t.graph is not g:
            yield Bad(repr(t.name), f"a tensor of graph {t.graph.name!r} as {where}", f"a tensor of graph {g.name!r}")


def _cycle(g: Graph) -> Iterator[Bad]:
    if not nx.is_directed_acyclic_graph(g.dag):
        names = [a.name for a, _ in nx.find_cycle(g.dag) if not isinstance(a, Tensor)]
        more = f" -> … ({len(names)} nodes)" if len(names) > _SHOWN else ""
        yield Bad("nodes", f"a cycle through {' -> '.join(map(repr, names[:_SHOWN]))}{more}", "no cycle")


def _unused(g: Graph) -> Iterator[Bad]:
    reached: list[object] = [out.tensor for out in g.outputs if out.tensor.graph is g]
    used = set(reached)
    for x in reached:  # grows while it is walked: one pass, however many outputs there are
        new = [y for y in g.dag.predecessors(x) if y not in used]
        used.update(new)
        reached += new
    for t in g.inputs:
        yield from when(bool(g.outputs) and t not in used,
                        Bad(repr(t.name), "an input that no output depends on", "inputs that are used"))


def _symbol_bounds(g: Graph) -> Iterator[Bad]:
    seen: dict[str, tuple[Sym, str]] = {}
    for t in g.inputs:
        for s in t.desc.syms:
            first, where = seen.setdefault(s.name, (s, t.name))
            yield from when(first != s, Bad(repr(t.name), f"{s!r}", f"{first!r} as in {where!r}"))


def _symbol_bound(g: Graph) -> Iterator[Bad]:
    """A symbol's value is read off an extent, so it must stand alone somewhere."""
    readable = {d.name for t in g.inputs for d in t.shape if isinstance(d, Sym)}
    declared = [*((t.name, (*t.shape, *(t.desc.stride or ()))) for t in g.inputs),
                *((out.name, (*out.tensor.shape, *(out.stride or ()))) for out in g.outputs)]
    for name, dims in declared:
        for s in (s for d in dims if is_symbolic(d) for s in symbols(d)):
            if s.name not in readable:
                yield Bad(repr(name), f"{s!r}", "a symbol that is an extent of some input by itself")
                break


STRUCTURE_RULES: tuple[Rule, ...] = (
    Rule("names", None, _names, "names are non-empty strings"),
    Rule("duplicates", None, _duplicates, "tensors are handed over under their names; rename one, for a result with output(t, name=…)"),
    Rule("extents", None, _extents),
    Rule("strides", None, _strides),
    Rule("reach", None, _reach),
    Rule("output_stride_count", None, _output_stride_count),
    Rule("output_overlap", None, _output_overlap),
    Rule("output_alignment", None, _output_alignment),
    Rule("no_output", None, _no_output, "call g.output(t)"),
    Rule("output_is_input", None, _output_is_input, "an output has a buffer of its own; g.cast(t, t.dtype) copies"),
    Rule("foreign", None, _foreign, "declare it in this graph"),
    Rule("cycle", None, _cycle),
    Rule("unused", None, _unused, "leave the declaration out"),
    Rule("symbol_bounds", None, _symbol_bounds, "one symbol has one maximum"),
    Rule("symbol_bound", None, _symbol_bound),
)
