"""Attention kernels as CUDA C++ templates for SM80-class tensor cores, compiled by NVRTC: compute capability 8.0 and
newer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from engines.base import Adapter, Engine, Reason, Target


class Sm80Engine(Engine):
    """Needs an equivalence gate, and cuda-core with NVRTC; importing it needs neither."""

    name: ClassVar[str] = "sm80"
    gated: ClassVar[bool] = True

    def adapters(self) -> tuple[Adapter, ...]:
        return _adapters()

    def unavailable(self, target: Target) -> Reason | None:
        from .limits import unavailable

        return unavailable(target)

    def automatic(self, target: Target) -> bool:
        return target.device == "cuda"

    def source_files(self) -> tuple[Path, ...]:
        from .compiler import source_files

        return source_files()

    def toolchain(self) -> Mapping[str, str]:
        from .compiler import toolchain

        return toolchain()


@lru_cache(maxsize=1)
def _adapters() -> tuple[Adapter, ...]:
    from .adapter_bwd import SdpaBwdDslSm80
    from .adapter_fwd import SdpaFwdDslSm80

    return (SdpaFwdDslSm80(), SdpaBwdDslSm80())


ENGINE = Sm80Engine()
