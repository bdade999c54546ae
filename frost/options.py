"""Misspelt options: a TypeError that names the nearest one, in the same words everywhere."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# What other libraries call it -> what it is called here, by the first name that the function has, and what to mind.
_ELSEWHERE: dict[str, tuple[tuple[str, ...], str]] = {
    "softmax_scale": (("scale",), ""),
    "sm_scale": (("scale",), ""),
    "is_causal": (("causal",), ""),
    "attn_mask": (("mask",), "a boolean mask; what is added to the scores is a bias"),
    "attn_bias": (("bias",), ""),
    "window_size": (("window",), "unbounded is None, not -1"),
    "logits_soft_cap": (("softcap",), ""),
    "return_softmax_lse": (("return_lse", "stats"), ""),
    "return_attn_probs": (("return_lse", "stats"), "probabilities are never stored"),
    "return_lse": (("stats",), ""),
    "stats": (("return_lse",), ""),
    # names of frost.nsa's own branches, where the whole module tells them apart
    "block_len": (("compress_len",), ""),
    "stride": (("compress_stride",), ""),
}
# What attention has elsewhere and has not here.
_ABSENT = {
    "dropout_p": "dropout is not supported",
    "enable_gqa": "grouped heads are implied by the shapes",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'causal'?", or the list of what is known."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _hint(name: str, known: tuple[str, ...]) -> str:
    """What follows "unknown option": the way out."""
    if name in _ABSENT and "q" in known:
        return f"; {_ABSENT[name]}"
    ours, remark = _ELSEWHERE.get(name, ((), ""))
    for candidate in ours:
        if candidate in known:
            return f"; it is called {candidate!r} here" + (f" ({remark})" if remark else "")
    return nearest(name, known)


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name in `given` that is not in `known`."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{what}: unknown option {name!r}{_hint(name, known)}")


def named_options(function: F) -> F:
    """Decorator: a keyword that the signature lacks becomes a TypeError with the nearest name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    known = tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return cast(F, checked)
