"""Attention kernels in Triton: compiled ahead of launch for CUDA targets, interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from engines.base import Adapter, Engine, Reason, Target


class TritonEngine(Engine):
    """Needs an equivalence gate on a GPU; on the CPU it runs only when it is asked for by name."""

    name: ClassVar[str] = "triton"
    gated: ClassVar[bool] = True

    def adapters(self) -> tuple[Adapter, ...]:
        return _adapters()

    def unavailable(self, target: Target) -> Reason | None:
        from .limits import unavailable

        return unavailable(target)

    def automatic(self, target: Target) -> bool:
        return target.device == "cuda"

    def needs_gate(self, target: Target) -> bool:
        return target.device == "cuda"

    def source_files(self) -> tuple[Path, ...]:
        from . import nsa_map, runtime

        return tuple(dict.fromkeys((*runtime.source_files(), *nsa_map.source_files())))

    def op_source_files(self, op: str) -> tuple[Path, ...]:
        from . import nsa_map, runtime

        return nsa_map.source_files() if op.startswith("nsa_") else runtime.source_files()

    def toolchain(self) -> Mapping[str, str]:
        from .runtime import toolchain

        return toolchain()


@lru_cache(maxsize=1)
def _adapters() -> tuple[Adapter, ...]:
    from .adapter_bwd import SdpaBwdDslTriton
    from .adapter_fwd import SdpaFwdDslTriton
    from .adapter_nsa import NsaSelectionBwdDslTriton, NsaSelectionFwdDslTriton
    from .adapter_nsa_cmp import NsaCompressedBwdDslTriton, NsaCompressedFwdDslTriton, NsaTopkDslTriton

    return (SdpaFwdDslTriton(), SdpaBwdDslTriton(), NsaSelectionFwdDslTriton(), NsaSelectionBwdDslTriton(),
            NsaCompressedFwdDslTriton(), NsaCompressedBwdDslTriton(), NsaTopkDslTriton())


ENGINE = TritonEngine()
