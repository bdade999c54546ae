"""What each attention backend needs, as a table, and the answer whether it is there.

A probe gives a verdict with a reason, either way. It reads versions and files; a package is imported only
where a CUDA device was asked about and answers, so that a question about the CPU never wakes a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines import registry
from engines.base import Target

FLASHMLA_CONTRACT = (
    "head_dim contract: MLA, head_dim_v 512, cannot serve a GQA head_dim 128 model on any GPU "
    "(flashmla multiplies queries of "
    "576 = 512 + 64 columns with one shared latent K/V head; it is a decoder for MLA models, no "
    "general attention)"
)

# The op whose gate decides, and the one a training run needs too.
_FORWARD, _BACKWARD = "sdpa", "sdpa_backward"


@dataclass(frozen=True)
class Where:
    """A device as a probe sees it: its target, or why there is none."""

    text: str
    target: Target | None
    problem: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.text.startswith("cuda")


@dataclass(frozen=True)
class Answer:
    """A probe's verdict. `reason` is never empty; `gate` is the stamp of the proof, where one is needed."""

    available: bool
    reason: str
    gate: str = "not needed"
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """A third party's attention: the module that is imported, its distributions, and where it runs."""

    module: str
    distributions: tuple[str, ...]
    archs: str
    serves: Callable[[tuple[int, int]], bool]
    note: str = ""


PACKAGES: dict[str, Package] = {
    "flash_attention_2": Package("flash_attn", ("flash-attn",), "sm_80 or newer", lambda cc: cc >= (8, 0)),
    "flash_attention_3": Package(
        "flash_attn_interface", ("flash-attn-3", "flash_attn_3"), "sm_90", lambda cc: cc == (9, 0)
    ),
    "flash_attention_4": Package(
        "flash_attn.cute", ("flash-attn-4",), "sm_90 or newer", lambda cc: cc >= (9, 0)
    ),
    "flashmla": Package(
        "flash_mla",
        ("flash-mla", "flash_mla"),
        "sm_90 or sm_100",
        lambda cc: cc in ((9, 0), (10, 0)),
        FLASHMLA_CONTRACT,
    ),
}


def resolve(device: Any) -> Where:
    """Where a probe is about. None: the CUDA device if there is one, else the CPU. Never raises."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, Target):
        text = device.device if device.device == "cpu" else f"{device.device}:{device.index}"
        return Where(text, device)
    try:
        dev = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as e:
        return Where(
            str(device), None, f"device: given {device!r}, expected a CPU or CUDA device ({_line(e)})"
        )
    if dev.type == "cpu":
        return Where("cpu", Target.cpu())
    if dev.type != "cuda":
        return Where(str(dev), None, f"device: given {str(dev)!r}, expected a CPU or CUDA device")
    if not torch.cuda.is_available():
        return Where(str(dev), None, f"no CUDA device answers for {str(dev)!r} (torch {torch.__version__})")
    try:
        index = (
            dev.index
            if dev.index is not None
            else (torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        )
        return Where(str(dev), Target.cuda(torch.cuda.get_device_capability(index), index))
    except (RuntimeError, AssertionError) as e:  # torch asserts on an index that is out of range
        return Where(str(dev), None, f"no CUDA device answers for {str(dev)!r} ({_line(e)})")


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())[:300] or type(e).__name__


# ---- PyTorch's own ---------------------------------------------------------------------------------------

_TORCH = {"torch": str(torch.__version__)}


def eager(where: Where) -> Answer:
    """Plain matrix products and a softmax: wherever tensors can live."""
    return Answer(
        not where.problem, where.problem or "plain PyTorch operations, on every device", versions=_TORCH
    )


def sdpa(where: Where) -> Answer:
    """`torch.nn.functional.scaled_dot_product_attention`, which picks among its own backends."""
    return Answer(
        not where.problem,
        where.problem or f"scaled_dot_product_attention of torch {torch.__version__}",
        versions=_TORCH,
    )


def flex(where: Where) -> Answer:
    """FlexAttention: part of torch; compiled, it needs torch.compile."""
    if where.problem:
        return Answer(False, where.problem, versions=_TORCH)
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return Answer(
            False, f"torch {torch.__version__} has no torch.nn.attention.flex_attention", versions=_TORCH
        )
    return Answer(
        True,
        f"FlexAttention of torch {torch.__version__}, fused where torch.compile compiles it",
        versions=_TORCH,
    )


def cudnn(where: Where) -> Answer:
    """cuDNN's attention, reached through PyTorch."""
    problems = [where.problem] if where.problem else []
    if not where.problem and not where.is_cuda:
        problems.append("runs on a CUDA device only, given cpu")
    if not torch.backends.cuda.is_built():
        problems.append(f"torch {torch.__version__} is built without CUDA")
    if problems or where.target is None:
        return Answer(False, "; ".join(problems), versions=_TORCH)
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        return Answer(False, f"torch {torch.__version__} finds no cuDNN", versions=_TORCH)
    versions = {**_TORCH, "cudnn": str(version)}
    if (where.target.cc or (0, 0)) < (8, 0):
        return Answer(False, f"arch: given {where.target}, expected sm_80 or newer", versions=versions)
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return Answer(
            False,
            "switched off here: torch.backends.cuda.enable_cudnn_sdp(True) switches it on",
            versions=versions,
        )
    return Answer(True, f"cuDNN {version} through torch {torch.__version__}", versions=versions)


# ---- other packages --------------------------------------------------------------------------------------


def package(name: str, where: Where) -> Answer:
    """A package of `PACKAGES`: installed, importable, and made for the device."""
    spec = PACKAGES[name]
    version = _installed(spec)
    problems = [where.problem] if where.problem else []
    if not where.problem and not where.is_cuda:
        problems.append("runs on a CUDA device only, given cpu")
    if version is None:
        problems.append(f"package {spec.distributions[0]!r} (module {spec.module}) is not installed")
    cc = None if where.target is None else where.target.cc
    if cc is not None and not spec.serves(cc):
        problems.append(f"arch: given {where.target}, expected {spec.archs}")
    if not problems:
        try:
            importlib.import_module(spec.module)
        except (Exception, SystemExit) as e:
            problems.append(f"module {spec.module} cannot be imported: {type(e).__name__}: {_line(e)}")
    versions = {**_TORCH, **({spec.distributions[0]: version} if version else {})}
    found = [] if problems else [f"{spec.distributions[0]} {version}"]
    return Answer(
        not problems, "; ".join([*problems, *found, *([spec.note] if spec.note else [])]), versions=versions
    )


def _installed(spec: Package) -> str | None:
    """The package's version, "unknown" for a module without metadata, None where it is not there."""
    for name in spec.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    top, _, rest = spec.module.partition(".")
    # Looking for a submodule would import its parent.
    return "unknown" if not rest and importlib.util.find_spec(top) is not None else None


# ---- ours ------------------------------------------------------------------------------------------------


def ours(
    engine: str, where: Where, gate_dir: str | Path | None, load_gates: Callable[[], Any], always_gated: bool
) -> Answer:
    """One of FROST's engines: the module that holds its gates, the engine, the device, and the proof.

    `load_gates` imports that module. `always_gated`: the proof is asked for on every device, the
    interpreter's included.
    """
    try:
        gates = load_gates()
    except ImportError as e:
        text = f"the module that holds its equivalence gate cannot be imported ({_line(e)})"
        return Answer(False, f"not yet implemented: {text}", gate="none", versions=_TORCH)
    if engine not in registry.names():
        return Answer(
            False,
            f"not yet implemented: this build has no engine {engine!r}, it has {', '.join(registry.names())}",
            gate="none",
            versions=_TORCH,
        )
    found = registry.get(engine)
    versions = {**_TORCH, **{name: str(v) for name, v in found.toolchain().items()}}
    problems = [where.problem] if where.problem else []
    stamp, told = "not needed", ""
    if where.target is None:
        refusal = _any_gate(gates, engine, gate_dir) if where.is_cuda else ""
        return Answer(False, "; ".join(filter(None, [*problems, refusal])), gate="none", versions=versions)
    missing = found.unavailable(where.target)
    if missing is not None:
        problems.append(str(missing))
    rows = [row for a in found.adapters() if a.op == _FORWARD for row in a.capabilities]
    if rows and all(where.target.device not in row.devices for row in rows):
        devices = " or ".join(sorted({d.upper() for row in rows for d in row.devices}))
        problems.append(f"runs on {devices} only, given {where.text}")
    elif always_gated or found.needs_gate(where.target):
        status = gates.check_equivalence_gate(
            engine=engine, op=_FORWARD, device=where.target, gate_dir=gate_dir
        )
        if not status.ok:
            problems.append(status.reason)
        stamp, told = status.stamp or "none", _gate_words(gates, engine, where.target, gate_dir)
    reason = "; ".join(problems) or (
        f"engine {engine}; equivalence gate {stamp}{told}"
        if told or stamp != "not needed"
        else f"engine {engine}"
    )
    return Answer(not problems, reason, gate=stamp, versions=versions)


def _gate_words(gates: Any, engine: str, target: Target, gate_dir: str | Path | None) -> str:
    """What the forward's gate does not say: whether the backward is proven too."""
    status = gates.check_equivalence_gate(engine=engine, op=_BACKWARD, device=target, gate_dir=gate_dir)
    return "; backward proven too" if status.ok else f"; forward only, the backward's {status.reason}"


def _any_gate(gates: Any, engine: str, gate_dir: str | Path | None) -> str:
    """Why no gate could hold on a device that cannot be asked for its environment: there is none, or none
    of the current source. "" where one might.
    """
    made = [f.gate for f in gates.iter_gates(gate_dir, engine=engine, op=_FORWARD) if f.gate is not None]
    if not made:
        return f"{gates.NOT_PASSED}: there is none for {engine}:{_FORWARD}; {gates.way_out(engine)}"
    source = gates.op_source_hash(engine, _FORWARD)
    if all(gate.source != source for gate in made):
        return (
            f"kernel source changed since the gate ran (given {source[:12]}, expected "
            f"{made[0].source[:12]}): the equivalence "
            f"gate no longer holds; {gates.way_out(engine)}"
        )
    return ""
