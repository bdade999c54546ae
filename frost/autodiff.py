"""The backward graph of a forward graph, by one rule per op.

Everything that a rule needs from the forward is, in this order: an input of the forward, one of its outputs, or made
again inside the backward graph. Attention is made again as a whole unless both its o and its lse are outputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

import networkx as nx

from descriptors import Dims, TensorDesc
from frost.errors import GraphError
from frost.graph import Graph, OpNode, Output, Tensor
from frost.nsa_autodiff import NSA_RULES, NSA_SMOOTH
from frost.options import named_options
from frost.validate import validate

Grads = Mapping[str, Tensor]          # gradients of an op's results, by field; none where no output depends on it
Rule = Callable[["_Backward", OpNode, Grads], Mapping[str, Tensor]]


@named_options
def backward_graph(graph: Graph, wrt: Sequence[str], *, deterministic: bool = False) -> Graph:
    """The graph that computes the gradients of `graph`'s inputs named in `wrt`.

    Its inputs: those inputs and outputs of `graph` that it needs, under their names and as declared there, and
    `d_<output>` (as the output: shape, dtype, declared stride) for each output that depends on `wrt`. Its outputs:
    `d_<input>`, like the input but row-major; zeros where no output depends on it. `deterministic` holds for every
    attention in it. Raises GraphError for an invalid graph, an unknown or non-floating name, or an op that has no
    derivative.
    """
    validate(graph)
    if isinstance(wrt, str):
        raise GraphError(f"wrt: given the string {wrt!r}, expected a list of names such as [{wrt!r}]")
    wrt = tuple(wrt)
    inputs = {t.name: t for t in graph.inputs}
    _check_wrt(wrt, inputs)
    backward = _Backward(graph, [inputs[name] for name in wrt], deterministic)
    backward.run()
    for name in wrt:
        backward.hand_out(inputs[name])
    validate(backward.out)  # an input of the forward may be called d_something already
    return backward.out


def _check_wrt(wrt: Sequence[str], inputs: Mapping[str, Tensor]) -> None:
    bad = [] if wrt else ["wrt: given no name, expected inputs of the graph"]
    for i, name in enumerate(wrt):
        if name not in inputs:
            near = difflib.get_close_matches(str(name), inputs, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            bad.append(f"wrt: given {name!r}, expected one of the inputs {list(inputs)}{hint}")
        elif not inputs[name].dtype.is_floating:
            bad.append(f"wrt: given {name!r} of dtype {inputs[name].dtype}, expected an input of a floating dtype")
        elif name in wrt[:i]:
            bad.append(f"wrt: given {name!r} twice, expected every name once")
    if bad:
        raise GraphError("\n".join(bad), bad)


class _Backward:
    """One run: `out` is the graph under construction, `values` the forward's tensors in it, `grads` their gradients."""

    def __init__(self, graph: Graph, wrt: Sequence[Tensor], deterministic: bool) -> None:
        self.graph, self.wrt, self.deterministic = graph, wrt, deterministic
        self.out = Graph(f"{graph.name}_backward")
        self.values: dict[Tensor, Tensor] = {}
        self.grads: dict[Tensor, Tensor] = {}
        self.outputs: dict[Tensor, Output] = {out.tensor: out for out in graph.outputs}
        self.made_again: dict[OpNode, OpNode] = {}
        self.order = _ordered(graph)
        self.position = {node: i for i, node in enumerate(self.order)}
        self.active = self._active()

    def run(self) -> None:
        for out in self.graph.outputs:
            if out.tensor in self.active:
                self.add(out.tensor, self.declare(f"d_{out.name}", out.desc))
        for node in reversed(self.order):
            self.through(node)

    def _active(self) -> set[Tensor]:
        """The forward's tensors that change with an input asked for."""
        active = set(self.wrt)
        for node in self.order:
            smooth = _SMOOTH.get(node.op, tuple(node.inputs))
            if any(node.inputs[name] in active for name in smooth if name in node.inputs):
                active.update(t for t in node.outputs.values() if t.dtype.is_floating)
        return active

    def through(self, node: OpNode) -> None:
        """Add what `node` passes on to its operands."""
        grads = {f: self.grads[t] for f, t in node.outputs.items() if t in self.grads}
        if not grads:
            return
        rule = RULES.get(node.op)
        if rule is None:
            raise GraphError(f"{node.op} (node {node.name!r}): has no derivative; expected one of {sorted(RULES)} "
                             "between the inputs to differentiate and the outputs")
        for name, grad in rule(self, node, grads).items():
            self.add(node.inputs[name], grad)

    def wants(self, node: OpNode, name: str) -> bool:
        """Whether operand `name` is there and its gradient leads to one that was asked for."""
        t = node.inputs.get(name)
        return t is not None and t in self.active

    def add(self, t: Tensor, grad: Tensor) -> None:
        self.grads[t] = self.out.add(self.grads[t], grad) if t in self.grads else grad

    def value(self, t: Tensor) -> Tensor:
        """The forward's `t` in the backward graph."""
        if t not in self.values:
            self._provide([t])
        return self.values[t]

    def again(self, node: OpNode) -> OpNode:
        """The forward op itself, once more; an attention always with its statistics."""
        if node not in self.made_again:
            self._provide(node.inputs.values())
            self._make_again(node)
        return self.made_again[node]

    def _provide(self, wanted: Iterable[Tensor]) -> None:
        """Declare, or make again, everything that the wanted tensors come from."""
        todo, missing = list(wanted), set()
        while todo:
            t = todo.pop()
            if t in self.values or t.producer in missing:
                continue
            if t.producer is None:
                self.values[t] = self.declare(t.name, t.desc)
            elif t in self.outputs:
                self.values[t] = self.declare(self.outputs[t].name, self.outputs[t].desc)
            else:
                missing.add(t.producer)
                todo += t.producer.inputs.values()
        for node in sorted(missing, key=self.position.__getitem__):
            self._make_again(node)

    def _make_again(self, node: OpNode) -> None:
        operands = {name: self.values[t] for name, t in node.inputs.items()}
        extra = {"stats": True} if "stats" in node.attrs else {}
        made = self.made_again[node] = self.out._record(node.op, operands, {**node.attrs, **extra}, None)
        for f, t in node.outputs.items():
            if t not in self.outputs:
                self.values[t] = made.outputs[f]

    def declare(self, name: str, desc: TensorDesc) -> Tensor:
        return self.out.tensor(name, desc.shape, stride=desc.stride, dtype=desc.dtype, alignment=desc.alignment)

    def sum_to(self, grad: Tensor, shape: Dims) -> Tensor:
        """Sum over the axes along which an operand of `shape` was broadcast."""
        return grad if grad.shape == shape else self.out._primitive("sum_to", x=grad, attrs={"shape": shape})

    def zeros_like(self, t: Tensor) -> Tensor:
        return self.out._primitive("zeros_like", x=t)

    def hand_out(self, t: Tensor) -> None:
        grad = self.grads[t] if t in self.grads else self.zeros_like(self.value(t))
        if grad.is_input:  # an output has a buffer of its own
            grad = self.out.cast(grad, grad.dtype)
        self.out.output(grad, name=f"d_{t.name}")


def _ordered(graph: Graph) -> list[OpNode]:
    rank = {node: i for i, node in enumerate(graph.dag)}
    return [n for n in nx.lexicographical_topological_sort(graph.dag, key=rank.__getitem__) if isinstance(n, OpNode)]


# Operands that results depend on smoothly, for the ops where it is not all of them.
_SMOOTH: dict[str, tuple[str, ...]] = {
    "sdpa": ("q", "k", "v", "bias", "sink"), "where": ("y", "z"), "mask_fill": ("x",), "zeros_like": (), **NSA_SMOOTH,
}


# ---- the rules: gradients of the operands from gradients of the results


def _per_operand(**terms: Callable[[_Backward, OpNode, Tensor], Tensor]) -> Rule:
    """A rule with one term per operand, made only where it is wanted and summed to the operand's shape."""
    def rule(b: _Backward, node: OpNode, grads: Grads) -> Mapping[str, Tensor]:
        return {name: b.sum_to(term(b, node, grads["out"]), node.inputs[name].shape)
                for name, term in terms.items() if b.wants(node, name)}
    return rule


def _operand(b: _Backward, node: OpNode, name: str) -> Tensor:
    return b.value(node.inputs[name])


def _swap(b: _Backward, t: Tensor) -> Tensor:
    rank = t.desc.rank
    return b.out.transpose(t, (*range(rank - 2), rank - 1, rank - 2))


def _from_result(op: str) -> Callable[[_Backward, OpNode, Tensor], Tensor]:
    """Ops whose derivative follows from their result."""
    def term(b: _Backward, node: OpNode, d: Tensor) -> Tensor:
        attrs = {"axis": node.attrs["axis"]} if "axis" in node.attrs else {}
        return b.out._primitive(op, x=b.value(node.outputs["out"]), y=d, attrs=attrs)
    return term


def _where_kept(b: _Backward, mask: Tensor, d: Tensor) -> Tensor:
    return b.out.where(mask, d, 0.0)


def _where_dropped(b: _Backward, mask: Tensor, d: Tensor) -> Tensor:
    return b.out.where(mask, b.zeros_like(d), d)


def _inverse(perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


def _cast(b: _Backward, node: OpNode, grads: Grads) -> Mapping[str, Tensor]:
    x = node.inputs["x"]
    return {"x": b.out.cast(grads["out"], x.dtype)} if b.wants(node, "x") else {}


def _sum_to(b: _Backward, node: OpNode, grads: Grads) -> Mapping[str, Tensor]:
    return {"x": b.out.add(b.zeros_like(_operand(b, node, "x")), grads["out"])} if b.wants(node, "x") else {}


def _sdpa(b: _Backward, node: OpNode, grads: Grads) -> Mapping[str, Tensor]:
    o, lse = node.outputs["o"], node.outputs.get("lse")
    if o in b.outputs and lse is not None and lse in b.outputs:
        results = {"o": b.value(o), "lse": b.value(lse)}
    else:
        results = dict(b.again(node).outputs)
    operands = {name: b.value(t) for name, t in node.inputs.items()}
    grad_of = {"do": grads["o"] if "o" in grads else b.zeros_like(results["o"])}
    if "lse" in grads:
        grad_of["dlse"] = grads["lse"]
    attrs = {name: value for name, value in node.attrs.items() if name != "stats"}
    asked = {f"d{name}": b.wants(node, name) for name in ("bias", "sink")}
    made = b.out._record("sdpa_backward", {**operands, **results, **grad_of}, {
        **attrs, **asked, "grads": tuple(n for n in ("q", "k", "v") if b.wants(node, n)),
        "deterministic": b.deterministic}, None)
    return {name[1:]: t for name, t in made.outputs.items()}


RULES: dict[str, Rule] = {
    "matmul": _per_operand(
        x=lambda b, n, d: b.out.matmul(d, _swap(b, _operand(b, n, "y"))),
        y=lambda b, n, d: b.out.matmul(_swap(b, _operand(b, n, "x")), d)),
    "scale": _per_operand(x=lambda b, n, d: b.out.scale(d, n.attrs["value"])),
    "add": _per_operand(x=lambda b, n, d: d, y=lambda b, n, d: d),
    "sub": _per_operand(x=lambda b, n, d: d, y=lambda b, n, d: b.out.scale(d, -1.0)),
    "mul": _per_operand(
        x=lambda b, n, d: b.out.mul(d, _operand(b, n, "y")), y=lambda b, n, d: b.out.mul(d, _operand(b, n, "x"))),
    "softmax": _per_operand(x=_from_result("softmax_backward")),
    "sigmoid": _per_operand(x=_from_result("sigmoid_backward")),
    "tanh": _per_operand(x=_from_result("tanh_backward")),
    "where": _per_operand(
        y=lambda b, n, d: _where_kept(b, _operand(b, n, "x"), d),
        z=lambda b, n, d: _where_dropped(b, _operand(b, n, "x"), d)),
    "mask_fill": _per_operand(x=lambda b, n, d: _where_kept(b, _operand(b, n, "y"), d)),
    "transpose": _per_operand(x=lambda b, n, d: b.out.transpose(d, _inverse(n.attrs["perm"]))),
    "reshape": _per_operand(x=lambda b, n, d: b.out.reshape(d, n.inputs["x"].shape)),
    "cast": _cast,
    "sum_to": _sum_to,
    "zeros_like": lambda b, n, d: {},
    "sdpa": _sdpa,
    **NSA_RULES,
}
