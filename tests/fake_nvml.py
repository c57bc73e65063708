"""A stand-in for the NVML library, below nvidia-ml-py: the real binding calls it and raises its own errors.

Only the library is replaced, so that argument passing, structure versions, sizing calls and error classes are the
binding's own. Each device has a UUID, a bus address, memory and processes; each function can be made to fail with a
code, or to be missing, as in older drivers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from gpusampler import nvml

GIB = 2**30


@dataclass(eq=False)
class Gpu:
    """One device, or one part of a divided one (MIG)."""

    uuid: str
    total: int = 80 * GIB
    free: int = 50 * GIB
    reserved: int = GIB // 2
    pci: str = "00000000:17:00.0"
    processes: dict[int, int | None] = field(default_factory=dict)
    mig: int | None = None
    name: str = "NVIDIA H100 80GB HBM3"
    handle: Any = field(default_factory=pynvml.struct_c_nvmlDevice_t)


class FakeLibrary:
    """What `pynvml.nvmlLib` holds; `calls` are the functions asked for, with the index or name asked by."""

    def __init__(self, devices: list[Gpu], parts: list[Gpu] = []) -> None:  # noqa: B006
        self.devices, self.parts = devices, parts
        self.fail: dict[str, int | list[int]] = {}
        self.missing: set[str] = set()
        self.calls: list[tuple[str, Any]] = []
        self.running = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        body = type(self).__dict__.get(f"_{name}")
        if body is None or name in self.missing:
            raise AttributeError(name)

        # a plain function: the binding sets `restype` on some
        def function(*arguments: Any) -> Any:
            self.calls.append((name, getattr(arguments[0], "value", None) if arguments else None))
            code = self.fail.get(name, 0)
            if isinstance(code, list):
                code = code.pop(0) if code else 0
            if code:
                return code
            if not self.running and name != "nvmlInitWithFlags" and name != "nvmlErrorString":
                return pynvml.NVML_ERROR_UNINITIALIZED
            return body(self, *arguments)

        return function

    def asked(self, name: str) -> list[Any]:
        """Arguments that a function was asked with."""
        return [argument for called, argument in self.calls if called == name]

    def _of(self, handle: Any) -> Gpu:
        address = ctypes.addressof(handle.contents)
        return next(gpu for gpu in self.devices + self.parts if ctypes.addressof(gpu.handle) == address)

    def _give(self, gpu: Gpu | None, device: Any) -> int:
        if gpu is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        device._obj.contents = gpu.handle
        return 0

    def _nvmlInitWithFlags(self, flags: int) -> int:
        self.running = True
        return 0

    def _nvmlErrorString(self, code: int) -> bytes:
        return f"text of error {code}".encode()

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        if index.value >= len(self.devices):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._give(self.devices[index.value], device)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        name = uuid.value.decode()
        return self._give(next((gpu for gpu in self.devices + self.parts if gpu.uuid == name), None), device)

    def _nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, device: Any) -> int:
        name = address.value.decode()
        return self._give(next((gpu for gpu in self.devices if gpu.pci == name), None), device)

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self._of(handle).name.encode()
        return 0

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self._of(handle).uuid.encode()
        return 0

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        mode = self._of(handle).mig
        if mode is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        current._obj.value = pending._obj.value = mode
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:
        gpu, into = self._of(handle), info._obj
        into.total, into.free, into.used = gpu.total, gpu.free, gpu.total - gpu.free
        return 0

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> int:
        gpu, into = self._of(handle), info._obj
        if into.version != 0x02000028:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        into.total, into.free, into.reserved = gpu.total, gpu.free, gpu.reserved
        into.used = gpu.total - gpu.free - gpu.reserved
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, into: Any) -> int:
        processes = self._of(handle).processes
        if not processes:
            count._obj.value = 0
            return 0
        if into is None or count._obj.value < len(processes):
            count._obj.value = len(processes)
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for i, (pid, used) in enumerate(processes.items()):
            into[i].pid = pid
            into[i].usedGpuMemory = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value if used is None else used
        count._obj.value = len(processes)
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any, count: Any, into: Any) -> int:
        return self._nvmlDeviceGetComputeRunningProcesses_v3(handle, count, into)


def install(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary, visible: str | None = None) -> FakeLibrary:
    """Put the library below the binding for one test, which then finds NVML not started."""
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(nvml, "_started", None)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return library
