"""The executable of every cell of this engine: a torch function on the stream it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engines.base import BoundCall, Executable, Launch, Workspace


class TorchCall(Executable):
    """Runs one of this engine's functions: `make` turns a launch into a call without arguments."""

    def __init__(self, kernel: str, make: Callable[[Launch], Callable[[], Any]]) -> None:
        self._kernel, self._make = kernel, make

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        call = self._make(launch)
        device = next((t.device for t in launch.operands.values()), torch.device("cpu"))
        if device.type != "cuda":
            return lambda stream: call()

        def on_stream(stream: int) -> None:
            with torch.cuda.device(device):
                if torch.cuda.current_stream(device).cuda_stream == stream:
                    call()
                    return
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
                    call()

        return on_stream

    def describe(self) -> Mapping[str, Any]:
        return {"kernels": [self._kernel]}
