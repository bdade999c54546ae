"""FROST: attention as a graph of ops on NVIDIA GPUs and CPUs, and an answer to which kernel ran, and why.

Build a `Graph` from tensor descriptors, `compile` it into a `Plan`, execute the plan on any buffers that match; or call
`attention` on torch tensors. `docs/design.md` has the whole picture.
"""

from . import _siblings as _siblings  # before anything else of ours: says which folder shadows a package

# isort: split
from descriptors import DType, WireError, sym

from . import backends, cache, env, gates, nsa, registry, routing
from ._version import __version__
from .autodiff import backward_graph
from .errors import BindError, DriverError, FrostError, GateError, GraphError, NotSupportedError, PlanError
from .functional import attention
from .graph import Graph, SdpaGrads, Tensor
from .plan import BoundPlan, Plan
from .plan_io import load_plan
from .registry import banner
from .routing import Route
from .values import debug

__all__ = [
    "BindError", "BoundPlan", "DType", "DriverError", "FrostError", "GateError", "Graph", "GraphError",
    "NotSupportedError", "Plan", "PlanError", "Route", "SdpaGrads", "Tensor", "WireError", "__version__", "attention", "backends", "backward_graph",
    "banner", "cache", "debug", "env", "gates", "load_plan", "nsa", "registry", "routing", "sym",
]
