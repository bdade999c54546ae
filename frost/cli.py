"""The command line: `frost probe | explain | run | bench | gate | routing | cache | report`, and `python -m
frost`.

Exit codes: 0 all is well, 1 something failed or does not hold, 2 the command makes no sense. `--json`
prints one JSON document on stdout instead of tables, {"error": {"type", "message", "exit_code", …}} where
there is no result; progress and messages go to stderr. What a command does is in `frost.commands`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ._version import __version__
from .commands.common import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    CommandError,
    Interrupted,
    UsageError,
    print_json,
    safe,
)

__all__ = ["FAILED", "OK", "USAGE", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        code = app(args=args, prog_name="frost", standalone_mode=False)
    except SystemExit as e:  # a closed pipe
        code = e.code
    except Exception as e:
        return _failed(e, as_json="--json" in args)
    return code if isinstance(code, int) else OK if code is None else FAILED


def _failed(e: Exception, as_json: bool) -> int:
    """Tell an error and return its exit code. A traceback is for what should not have happened."""
    from .errors import FrostError

    code, text = FAILED, str(e) or type(e).__name__
    if isinstance(e, typer.Abort):
        code, text = INTERRUPTED, "interrupted"
    elif isinstance(e, CommandError):
        code = e.code
    elif hasattr(e, "format_message"):  # of the parser; its class has moved from one release to the next
        code, text = USAGE, _of_the_parser(e)
    elif not isinstance(e, (FrostError, OSError, ValueError)):
        traceback.print_exception(type(e), e, e.__traceback__)
    print(f"frost: {safe(text)}", file=sys.stderr)
    if as_json:
        kind = "UsageError" if code == USAGE else type(e).__name__
        more = {n: getattr(e, n) for n in ("reasons", "violations") if hasattr(e, n)}
        with contextlib.suppress(OSError):  # stdout may be what failed
            print_json({"error": {"type": kind, "message": text, "exit_code": code, **more}})
    return code


def _of_the_parser(e: Any) -> str:
    context = getattr(e, "ctx", None)
    where = "" if context is None else f"\nusage: {context.command_path} --help says what there is"
    return f"{e.format_message()}{where}"


# ---- the frame -------------------------------------------------------------------------------------------


class _Group(TyperGroup):
    """Commands whose misspelling names the nearest, and whose absence is an error in the same words
    everywhere.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            group = "" if ctx.parent is None else f"{ctx.info_name}: "
            raise UsageError(
                f"{group}invalid choice: given {args[0]!r}, expected one of {', '.join(known)}{hint}"
            )
        return super().resolve_command(ctx, args)


def _needs_command(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        known = ", ".join(ctx.command.list_commands(ctx))  # type: ignore[attr-defined]
        raise UsageError(
            f"a command is required, one of {known}\nusage: {ctx.command_path} COMMAND [ARGUMENTS] "
            "(--help says more)"
        )


def _app(text: str) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=text,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


app = _app("Attention as a graph: which kernel ran, why that one, and what proves it right.")
gate_app = _app("Equivalence gates.")
routing_app = _app("Routing dumps.")
cache_app = _app("The cache folder.")
for _name, _sub in (("gate", gate_app), ("routing", routing_app), ("cache", cache_app)):
    _sub.callback()(_needs_command)
    app.add_typer(_sub, name=_name)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"frost {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    _needs_command(ctx)


def _command(group: typer.Typer, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command whose returned number is the exit code."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                code = function(*args, **kwargs)
            except KeyboardInterrupt as e:
                raise Interrupted("interrupted") from e
            raise typer.Exit(code)

        group.command(name)(run)
        return function

    return register


def _required(name: str, values: list[Any] | None) -> list[Any]:
    if not values:
        raise UsageError(f"{name} is required: given none, expected at least one")
    return values


_JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")
_DEVICE = typer.Option(None, "--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one).")
_TARGET = typer.Option(
    None, "--device", help="cpu, cuda, cuda:1, or an arch such as sm_90 to compile for without having it."
)
_ENGINES = typer.Option(None, "--engines", help="These engines only, in this order, comma-separated.")
_GATES = typer.Option(None, "--gates", help="require, auto or off (default: FROST_GATES, else require).")
_GATE_DIR = typer.Option(None, "--gate-dir", help="Look at the gates in this folder instead.")
_SAVE = typer.Option(None, "--save", help="Keep what was found for `frost report`.")
_GRAPH = typer.Argument(
    None, metavar="GRAPH", help="A file with what Graph.to_bytes() returned.", show_default=False
)


def _one(graph: Path | None) -> Path:
    return _required("GRAPH", [graph] if graph else None)[0]


# ---- backends and graphs ---------------------------------------------------------------------------------


@_command(app, "probe")
def _probe(device: str | None = _DEVICE, gate_dir: Path | None = _GATE_DIR, as_json: bool = _JSON) -> int:
    """Every attention backend: available or not, and why."""
    from .commands import backends

    return backends.probe(device, gate_dir, as_json)


@_command(app, "explain")
def _explain(
    graph: Path | None = _GRAPH,
    device: str | None = _TARGET,
    engines: str | None = _ENGINES,
    gates: str | None = _GATES,
    as_json: bool = _JSON,
) -> int:
    """Compile a graph and say where each node goes, and why not elsewhere."""
    from .commands import graph as commands

    return commands.explain(_one(graph), device, engines, gates, as_json)


@_command(app, "run")
def _run(
    graph: Path | None = _GRAPH,
    device: str | None = _DEVICE,
    engines: str | None = _ENGINES,
    gates: str | None = _GATES,
    bind: list[str] | None = typer.Option(
        None, "--bind", metavar="NAME=NUMBER", help="The value of a symbol; may be repeated."
    ),
    seed: int = typer.Option(0, "--seed", help="Of the operands."),
    repeat: int = typer.Option(5, "--repeat", help="Timed calls."),
    check: bool = typer.Option(
        True, "--check/--no-check", help="Compare the outputs with the reference engine's."
    ),
    save: Path | None = _SAVE,
    as_json: bool = _JSON,
) -> int:
    """Execute a graph on seeded operands."""
    from .commands import graph as commands

    return commands.run(_one(graph), device, engines, gates, bind or [], seed, repeat, check, save, as_json)


@_command(app, "bench")
def _bench(
    batch: int | None = typer.Option(None, "--batch", help="Default: 4; on a CPU 1."),
    seq: list[int] | None = typer.Option(
        None, "--seq", help="May be repeated (default: 512, 1024, 2048; on a CPU 128)."
    ),
    heads: int = typer.Option(32, "--heads"),
    kv_heads: int = typer.Option(8, "--kv-heads"),
    head_dim: int = typer.Option(128, "--head-dim"),
    iters: int = typer.Option(20, "--iters", help="Timed calls."),
    device: str | None = _DEVICE,
    dtype: str | None = typer.Option(
        None, "--dtype", help="bf16, fp16 or fp32 (default: bf16; on a CPU fp32)."
    ),
    save: Path | None = _SAVE,
    as_json: bool = _JSON,
) -> int:
    """Time one causal forward on every backend that gets it right."""
    from .commands import backends

    return backends.bench(
        batch,
        seq or [],
        heads,
        kv_heads,
        head_dim,
        iters,
        device,
        dtype,
        save,
        as_json,
    )


@_command(app, "report")
def _report(
    runs: list[Path] | None = typer.Argument(
        None, metavar="[RUN]...", help="Saved runs (--save).", show_default=False
    ),
    out: Path = typer.Option(Path("report.html"), "-o", "--out", help="The page."),
    graph: list[Path] | None = typer.Option(
        None, "--graph", help="A graph to compile here; may be repeated."
    ),
    routing: list[Path] | None = typer.Option(
        None, "--routing", help="A routing dump; may be repeated (default: .frost_routing/)."
    ),
    bench: list[Path] | None = typer.Option(
        None, "--bench", help="A CSV of python -m tools.bench; may be repeated."
    ),
    gate_dir: Path | None = _GATE_DIR,
    device: str | None = _TARGET,
    save: Path | None = _SAVE,
    as_json: bool = _JSON,
) -> int:
    """One self-contained HTML page: graphs, routes, plans, gates, shares, benchmarks."""
    from .commands import report as commands

    return commands.report(
        runs or [], graph or [], routing or [], bench or [], gate_dir, device, out, save, as_json
    )


# ---- gates, routing, cache -------------------------------------------------------------------------------


@_command(gate_app, "run")
def _gate_run(
    engine: str = typer.Argument("triton"),
    device: str | None = typer.Option(
        None, "--device", help="cpu (the interpreter), cuda or cuda:<index>; a GPU where there is one."
    ),
    op: list[str] | None = typer.Option(None, "--op", help="Only this op; may be repeated."),
    out: Path | None = typer.Option(
        None, "--out", help="Folder for the artifacts (default: your own gate folder)."
    ),
    as_json: bool = _JSON,
) -> int:
    """Run an engine's matrix on a device; write its gates if green."""
    from .commands import gate

    return gate.run(engine, device, op or [], out, as_json)


_ENGINE = typer.Argument(None, help="Only this engine's.", show_default=False)


@_command(gate_app, "check")
def _gate_check(
    engine: str | None = _ENGINE, gate_dir: Path | None = _GATE_DIR, as_json: bool = _JSON
) -> int:
    """Check the shipped gates against the source; needs no GPU."""
    from .commands import gate

    return gate.check(engine, gate_dir, as_json)


@_command(gate_app, "list")
def _gate_list(engine: str | None = _ENGINE, gate_dir: Path | None = _GATE_DIR, as_json: bool = _JSON) -> int:
    """List the gates that lowering would look at, in its order."""
    from .commands import gate

    return gate.listing(engine, gate_dir, as_json)


@_command(routing_app, "show")
def _routing_show(
    files: list[Path] | None = typer.Argument(None, metavar="FILE...", show_default=False),
    as_json: bool = _JSON,
) -> int:
    """Shares per engine and decline reasons of dumps, merged."""
    from .commands import routing

    return routing.show(_required("FILE", files), as_json)


@_command(routing_app, "diff")
def _routing_diff(
    files: list[Path] | None = typer.Argument(None, metavar="A B", show_default=False),
    tolerance: float = typer.Option(
        0.0, "--tolerance", help="How far a share may move, 0.01 is one percent."
    ),
    as_json: bool = _JSON,
) -> int:
    """Where two dumps differ: 0 the same shares, 1 some moved, 2 trouble."""
    from .commands import routing

    pair = _required("A B", files)
    if len(pair) != 2:
        raise UsageError(f"A B: given {len(pair)} files, expected two")
    return routing.diff(pair[0], pair[1], tolerance, as_json)


@_command(cache_app, "info")
def _cache_info(as_json: bool = _JSON) -> int:
    """Where it is and what is in it."""
    from .commands import cache

    return cache.info(as_json)


@_command(cache_app, "clear")
def _cache_clear(as_json: bool = _JSON) -> int:
    """Delete the compiled kernels; gates stay."""
    from .commands import cache

    return cache.clear(as_json)
