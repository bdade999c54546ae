"""Launch plumbing without a GPU: parameter layout, tensor maps encoded only when an address moves, persistent grids."""

from __future__ import annotations

from typing import Any

import pytest

from engines import cuda_driver
from engines.cuda_driver import TENSOR_MAP_BYTES, ParamPack
from engines.template_loader import Bundle
from engines.triton.launching import FLAT, FOLDED, PERSISTENT, FrozenKernel, Operand
from engines.triton.params import Arg


def test_parameters_lie_where_the_kernel_abi_puts_them() -> None:
    """Natural alignment; a tensor map starts at a multiple of 64 bytes of the constant bank, whose byte 0x210 is the first
    parameter's (`tests/unit/test_hopper.py` compares with a compiled kernel)."""
    pack = ParamPack(["tmap", "i32", "i32", "i32", "i32", "i64", "tmap", "ptr", "i32", "fp32", "ptr"])
    assert pack.offsets == (48, 176, 180, 184, 188, 192, 240, 368, 376, 380, 384)
    data = pack([b"\1" * 128, 1, 2, 3, 4, 5, b"\2" * 128, 6, 7, 1.0, 8])
    assert len(data) == 392 and data[:48] == bytes(48) and data[200:240] == bytes(40) and data[240:368] == b"\2" * 128
    assert ParamPack(["i32", "ptr", "i32"]).offsets == (0, 8, 16)


class _Tensor:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Kernel:
    """What a FrozenKernel asks of its kernel: two tensor maps, one pointer, one number."""

    def __init__(self) -> None:
        self.args = (Arg("q_desc", "", "tmap"), Arg("k_desc", "", "tmap"), Arg("o_ptr", "*bf16", "ptr"),
                     Arg("n_programs", "i32", "i32"))
        numbers = ["i32"] * 4 + ["i64"] * 4
        kinds = ["tmap", *numbers, "tmap", *numbers, "ptr", "i32", "ptr", "ptr"]
        facts: list[Any] = [9, 2, 3, [1, 1, 64, 64]]
        self.bundle = Bundle(b"", {"kinds": kinds, "maps": [facts, facts]})
        self.pack = ParamPack(kinds)

    def offset(self, kind: str) -> int:
        return self.pack.offsets[self.bundle.meta["kinds"].index(kind)]

    def maps(self) -> Any:
        yield from zip((48, 240), self.bundle.meta["maps"], ("q_desc", "k_desc"))

    def function(self, device: int) -> str:
        return "loaded"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Encodings and launches as they happen."""
    seen: dict[str, Any] = {"encoded": [], "launches": []}

    def encode(self: Any, address: int, index: int) -> bytes:
        seen["encoded"].append(address)
        return address.to_bytes(8, "little") * (TENSOR_MAP_BYTES // 8)

    monkeypatch.setattr(cuda_driver.TensorMap, "encode", encode)
    monkeypatch.setattr(cuda_driver, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(cuda_driver, "launch",
                        lambda function, grid, buffer, stream: seen["launches"].append((grid, bytes(buffer.data))))
    return seen


def _frozen(programs: int, grid: str = FOLDED) -> FrozenKernel:
    extents = ((1, 1, 64, 64), (4096, 4096, 64, 1))
    pointers = {"q_desc": Operand("q"), "k_desc": Operand("k"), "o_ptr": Operand("o")}
    numbers = {"q_desc": extents, "k_desc": extents, "n_programs": programs}
    return FrozenKernel(_Kernel(), programs, numbers, pointers, grid)  # type: ignore[arg-type]


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at:at + 8], "little")


def test_a_map_is_encoded_again_only_where_its_address_moved(launched: dict[str, Any]) -> None:
    frozen = _frozen(10)
    operands = {"q": _Tensor(4096), "k": _Tensor(8192), "o": _Tensor(16384)}
    frozen.launch(operands, None, 0, 0)
    frozen.launch(operands, None, 0, 0)
    assert launched["encoded"] == [4096, 8192]
    operands["k"] = _Tensor(12288)
    frozen.launch(operands, None, 0, 0)
    assert launched["encoded"] == [4096, 8192, 12288]
    last = launched["launches"][-1][1]
    assert (_word(last, 48), _word(last, 240)) == (4096, 12288)
    assert _word(last, frozen._kernel.offset("ptr")) == 16384


def test_a_bound_launch_keeps_its_own_maps(launched: dict[str, Any]) -> None:
    frozen = _frozen(10)
    operands = {"q": _Tensor(4096), "k": _Tensor(8192), "o": _Tensor(16384)}
    bound = frozen.bind(operands, None, 0)
    frozen.launch({**operands, "q": _Tensor(64)}, None, 0, 0)
    bound(0)
    data = launched["launches"][-1][1]
    assert (_word(data, 48), _word(data, 240)) == (4096, 8192)


@pytest.mark.parametrize("programs, kind, grid", [
    (10, FOLDED, (10, 1, 1)), (10, PERSISTENT, (10, 1, 1)), (5000, FOLDED, (5000, 1, 1)), (5000, PERSISTENT, (132, 1, 1)),
    (70_000, FOLDED, (65_535, 2, 1)), (70_000, FLAT, (70_000, 1, 1))])
def test_grids(launched: dict[str, Any], programs: int, kind: str, grid: tuple[int, int, int]) -> None:
    _frozen(programs, kind).launch({"q": _Tensor(64), "k": _Tensor(64), "o": _Tensor(64)}, None, 0, 0)
    assert launched["launches"][-1][0] == grid


def test_nothing_is_launched_or_encoded_without_programs(launched: dict[str, Any]) -> None:
    frozen = _frozen(0)
    frozen.launch({}, None, 0, 0)
    frozen.bind({}, None, 0)(0)
    assert not launched["encoded"] and not launched["launches"]


def test_a_map_is_encoded_in_a_thread_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses; it is asked again, once, in the device's context, which is not left behind."""

    class Library:
        def __init__(self, answers: list[int]) -> None:
            self.answers, self.current, self.used = answers, [], []

        def cuTensorMapEncodeTiled(self, *args: Any) -> int:
            self.used.append(tuple(self.current))
            return self.answers.pop(0)

        def cuCtxPushCurrent_v2(self, context: int) -> int:
            self.current.append(context)
            return 0

        def cuCtxPopCurrent_v2(self, context: Any) -> int:
            self.current.pop()
            return 0

    class Driver:
        check = cuda_driver._Driver.check

        def __init__(self, answers: list[int]) -> None:
            self.lib = Library(answers)
            self.lib.cuGetErrorName = lambda rc, name: 0

    def encoded(answers: list[int]) -> Library:
        driver = Driver(answers)
        monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
        monkeypatch.setattr(cuda_driver, "_primary_context", lambda index: 1000 + index)
        libraries.append(driver.lib)
        made = cuda_driver.TensorMap(dtype=9, itemsize=2, shape=(1, 64), strides=(64, 1), box=(1, 64), swizzle=3)
        assert len(made.encode(4096, 3)) == TENSOR_MAP_BYTES
        return driver.lib

    libraries: list[Library] = []
    assert encoded([0]).used == [()]
    assert encoded([cuda_driver._INVALID_CONTEXT, 0]).used == [(), (1003,)]
    with pytest.raises(cuda_driver.DriverError, match="cuTensorMapEncodeTiled"):
        encoded([cuda_driver._INVALID_CONTEXT, cuda_driver._INVALID_CONTEXT])
    assert all(library.current == [] for library in libraries) and len(libraries) == 3
