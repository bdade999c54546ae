"""An engine that needs a gate, for the tests of gates: one source file, the reference's forward underneath."""

from pathlib import Path
from typing import ClassVar

from descriptors import DType
from engines import registry
from engines.base import Capabilities, Engine, SdpaFwdDsl


def dummy_engine(source: Path) -> Engine:
    """A gated engine of one source file; its forward is the reference's unless a test replaces it."""
    class DummyAdapter(SdpaFwdDsl):
        engine = "dummy"
        capabilities = (Capabilities("dummy", "sdpa", ("cpu", "cuda"), (DType.F32, DType.F16, DType.BF16),
                                     registry.get("reference").adapter(SdpaFwdDsl).capabilities[0].features),)

        def compile(self, desc, target):
            return registry.get("reference").adapter(SdpaFwdDsl).compile(desc, target)

    class Dummy(Engine):
        name, gated = "dummy", True
        tools: ClassVar = {"dummycc": "1.2"}
        adapter_type = DummyAdapter

        def adapters(self):
            return (self.adapter_type(),)

        def source_files(self):
            return (source,)

        def toolchain(self):
            return self.tools

    source.write_text("kernel one")
    made = Dummy()
    made.source = source
    return made
