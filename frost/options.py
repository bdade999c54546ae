"""Misspelt options: a TypeError that names the nearest one, in the same words everywhere."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def nearest(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'causal'?", or the list of what is known."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name in `given` that is not in `known`."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{what}: unknown option {name!r}{nearest(name, known)}")


def named_options(function: F) -> F:
    """Decorator: a keyword that the signature lacks becomes a TypeError with the nearest name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    known = tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return cast(F, checked)
