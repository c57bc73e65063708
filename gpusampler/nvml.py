"""Device memory as the driver sees it, through NVML (`nvidia-ml-py`), without a CUDA context and without exceptions.

A reading answers every question or says why not. NVML may be missing, older than its binding, of another version than
the kernel driver, unsupported for memory that a GPU shares with its host, or not permitted; none of that may end a
training run. So everything that talks to the library runs inside `_ask`, which turns any exception into a reason.

NVML numbers devices in bus order and CUDA, by default, fastest first; `CUDA_VISIBLE_DEVICES` reorders them and may name
parts of one (MIG). A device is therefore found by the UUID that CUDA reports once it runs in this process, or by its
PCI address; before that, by its entry in `CUDA_VISIBLE_DEVICES`, and `found_by` tells which. Source of the conduct of
the functions: NVML API reference, R525 to R590. A reading takes well under a millisecond.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")

_INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND, _UNINITIALIZED, _VERSION_MISMATCH = 7, 13, 1, 25
_MOST_DIGITS = 10
_started: tuple[int, int] | None = None
"""Process and module that NVML was started in and by: a fork must start it again."""


@dataclass(frozen=True)
class NvmlReading:
    """What NVML says of one device; bytes.

    Attributes:
        name: of the device.
        uuid: "GPU-..." or "MIG-...".
        found_by: "uuid", "pci", "CUDA_VISIBLE_DEVICES" or "index": how the device was found; the last two trust that
            CUDA numbers devices as NVML does, unless the entry is a UUID.
        api: version of the call that gave the memory figures.
        total: memory of the device.
        free: of it, not allocated by anyone.
        reserved: of `total - free`, held by the driver and firmware.
        process: allocated by this process.
        reasons: for each of these that is None, why.
    """

    name: str | None = None
    uuid: str | None = None
    found_by: str | None = None
    api: str | None = None
    total: int | None = None
    free: int | None = None
    reserved: int | None = None
    process: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)


class Nvml:
    """One CUDA device in NVML; construction never fails.

    Args:
        index: CUDA device index in this process.
    """

    def __init__(self, index: int) -> None:
        """Find the device."""
        self.index = index
        found, self.reason = _ask(lambda: _find(_library(), index))
        self._handle: Any = None
        self.found_by: str | None = None
        if found is not None:
            self._handle, self.found_by = found

    def read(self) -> NvmlReading:
        """Read every figure anew."""
        if self._handle is None:
            reason = self.reason or "no device"
            names = ("name", "uuid", "found_by", "api", "total", "free", "reserved", "process")
            return NvmlReading(reasons=dict.fromkeys(names, reason))
        reasons: dict[str, str] = {}

        def ask(names: tuple[str, ...], question: Callable[[], Answer]) -> Answer | None:
            answer, reason = _ask(question)
            if reason is not None:
                reasons.update(dict.fromkeys(names, reason))
            return answer

        handle = self._handle
        memory = ask(("api", "total", "free", "reserved"), lambda: _memory(_library(), handle))
        api, total, free, reserved = memory or (None, None, None, None)
        if memory and reserved is None:
            reasons["reserved"] = "this driver has only version 1 of nvmlDeviceGetMemoryInfo, which does not tell it"
        return NvmlReading(
            name=ask(("name",), lambda: str(_library().nvmlDeviceGetName(handle))),
            uuid=ask(("uuid",), lambda: str(_library().nvmlDeviceGetUUID(handle))),
            found_by=self.found_by,
            api=api,
            total=total,
            free=free,
            reserved=reserved,
            process=ask(("process",), lambda: _process(_library(), handle)),
            reasons=reasons,
        )


class _NotToldError(Exception):
    """A figure cannot be had; the message is the reason."""


def cuda_started() -> bool:
    """Whether torch has started CUDA in this process; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_count() -> int:
    """CUDA devices that NVML and `CUDA_VISIBLE_DEVICES` let this process see; 0 if that cannot be told."""
    count = _ask(lambda: int(_library().nvmlDeviceGetCount()))[0]
    visible = _visible_entries(count)
    return (count or 0) if visible is None else len(visible)


def _ask(question: Callable[[], Answer]) -> tuple[Answer | None, str | None]:
    """Answer and None, or None and why there is no answer."""
    global _started
    reason = None
    for _ in range(2):
        try:
            return question(), None
        except _NotToldError as error:
            return None, str(error)
        # not only NVMLError: bindings and drivers that do not fit each other raise anything, and training must go on
        except Exception as error:
            code = getattr(error, "value", None)
            reason = _describe(error, code)
            if code == _UNINITIALIZED:
                _started = None
            elif code != _INSUFFICIENT_SIZE:
                break
    return None, reason


def _describe(error: Exception, code: Any) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    if isinstance(error, ImportError):
        return f"NVML needs the package nvidia-ml-py ({text})"
    return f"NVML error {code}: {text}" if isinstance(code, int) else f"{type(error).__name__}: {text}"


def _library() -> Any:
    """The binding, started in this process."""
    global _started
    import pynvml

    key = (os.getpid(), id(pynvml))
    if _started != key:
        pynvml.nvmlInit()
        _started = key
    return pynvml


def _visible_entries(count: int | None) -> list[str] | None:
    """Entries of `CUDA_VISIBLE_DEVICES` that CUDA takes, of `count` devices if that is known; None if it is not set.

    CUDA stops at the first entry that names no device or is of another kind than the first, and takes none at all if
    one is repeated.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries: list[str] = []
    for name in map(str.strip, text.split(",")):
        kind = _kind(name)
        beyond = kind == "index" and count is not None and int(name) >= count
        if kind is None or beyond or (entries and kind != _kind(entries[0])):
            break
        if name in entries:
            return []
        entries.append(name)
    return entries


def _kind(name: str) -> str | None:
    if name.isascii() and name.isdecimal() and len(name) < _MOST_DIGITS:
        return "index"
    return name[:4] if name.startswith(("GPU-", "MIG-")) else None


def _find(nvml: Any, index: int) -> tuple[Any, str]:
    entries = _visible_entries(_ask(nvml.nvmlDeviceGetCount)[0])
    entry = entries[index] if entries is not None and index < len(entries) else None
    if cuda_started() and not (entry or "").startswith("MIG-"):
        found = _find_as_cuda_names_it(nvml, torch.cuda.get_device_properties(index))
        if found is not None:
            return found
    if entries is not None and entry is None:
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        raise _NotToldError(f"cuda:{index} is not among the devices of CUDA_VISIBLE_DEVICES={seen!r}")
    if entry is not None and _kind(entry) != "index":
        return _by_uuid(nvml, entry), "CUDA_VISIBLE_DEVICES"
    handle = nvml.nvmlDeviceGetHandleByIndex(index if entry is None else int(entry))
    mig = _ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])[0]
    if mig:
        raise _NotToldError("the GPU is divided (MIG): name the part in CUDA_VISIBLE_DEVICES, or ask once CUDA runs")
    return handle, "index" if entry is None else "CUDA_VISIBLE_DEVICES"


def _find_as_cuda_names_it(nvml: Any, properties: Any) -> tuple[Any, str] | None:
    """By the UUID of a device that CUDA has opened, else by its bus address; both were added to torch over time."""
    uuid = str(getattr(properties, "uuid", ""))
    tail = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for name in (f"GPU-{tail}", f"MIG-{tail}") if tail else ():
        handle, _ = _ask(partial(nvml.nvmlDeviceGetHandleByUUID, name))
        if handle is not None:
            return handle, "uuid"
    if not hasattr(properties, "pci_bus_id"):
        return None
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    handle, _ = _ask(partial(nvml.nvmlDeviceGetHandleByPciBusId, address))
    return None if handle is None else (handle, "pci")


def _by_uuid(nvml: Any, name: str) -> Any:
    """Handle of a full UUID, or of the one GPU whose UUID starts so: CUDA takes unique beginnings too."""
    handle, reason = _ask(partial(nvml.nvmlDeviceGetHandleByUUID, name))
    if handle is not None:
        return handle
    if name.startswith("GPU-"):
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        same = [each for each in handles if str(nvml.nvmlDeviceGetUUID(each)).startswith(name)]
        if len(same) == 1:
            return same[0]
    raise _NotToldError(f"no device for {name} of CUDA_VISIBLE_DEVICES: {reason}")


def _memory(nvml: Any, handle: Any) -> tuple[str, int, int, int | None]:
    """API, total, free and reserved; version 1 of the call counts reserved memory as used and does not tell it."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        api, reserved = "nvmlDeviceGetMemoryInfo_v2", int(info.reserved)
    except Exception as error:
        if not _is_missing(error):
            raise
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        api, reserved = "nvmlDeviceGetMemoryInfo", None
    total, free = int(info.total), int(info.free)
    if total == 0:
        raise _NotToldError("NVML gives a total of 0 bytes")
    return api, total, free, reserved


def _is_missing(error: Exception) -> bool:
    """Whether the driver or the binding is older than the version of a call."""
    old_binding = isinstance(error, (TypeError, AttributeError))
    return old_binding or getattr(error, "value", None) in (_FUNCTION_NOT_FOUND, _VERSION_MISMATCH)


def _process(nvml: Any, handle: Any) -> int:
    """Bytes of this process; NVML lists pids of the host, which a container does not know its own by."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except Exception as error:
        if not _is_missing(error):
            raise
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    mine = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
    if not mine:
        raise _NotToldError(
            f"pid {os.getpid()} is not among the {len(processes)} processes that NVML lists: it has not used the "
            "device, or runs in a container, where NVML lists pids of the host"
        )
    if any(used is None for used in mine):
        raise _NotToldError("NVML does not tell the memory of a process here (WDDM, or a part of a divided GPU)")
    return sum(int(used) for used in mine)
