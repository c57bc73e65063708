"""Memory of a device at one moment: the driver's figures beside the allocator's.

torch's allocator knows what tensors take, to the byte and with exact peaks, and nothing else. NVML knows the device:
also contexts, NCCL's buffers, libraries and other processes. Both are reported as they are; the two figures that
subtract one from the other say so. A figure that cannot be had is None, with its reason, and never 0; nothing here
raises because of the machine, or creates a CUDA context. Figures in bytes; a report takes well under a millisecond.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.nvml import Nvml, NvmlReading, cuda_started

GIB = 2**30
_NVML = ("name", "uuid", "found_by", "api", "total", "free", "reserved", "process")
_ALLOCATOR = {
    "allocated": "allocated_bytes.all.current",
    "allocated_peak": "allocated_bytes.all.peak",
    "pool": "reserved_bytes.all.current",
    "pool_peak": "reserved_bytes.all.peak",
}


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one device at one moment; bytes, None where `reasons` says why.

    Attributes:
        device: as torch names it.
        name: product name.
        uuid: as NVML names the device.
        found_by: how NVML's device was found for torch's: "uuid", "pci", "CUDA_VISIBLE_DEVICES" or "index".
        api: call that gave `total` and `free`.
        total: memory of the device.
        free: of it, allocated by nobody.
        used: `total - free`, whoever holds it; includes `reserved`.
        reserved: of `used`, held by driver and firmware.
        process: of `used`, this process's.
        allocated: tensors of this process, in torch's allocator.
        allocated_peak: the most that was allocated since the peak was last reset.
        pool: what the allocator holds, `allocated` included.
        pool_peak: the most it has held since the peak was last reset.
        outside: `process - pool`, of NVML and of torch: context, NCCL, libraries.
        elsewhere: `used - pool`, of NVML and of torch: `outside`, `reserved` and other processes.
        reasons: for each figure that is None, why.
    """

    device: str
    name: str | None = None
    uuid: str | None = None
    found_by: str | None = None
    api: str | None = None
    total: int | None = None
    free: int | None = None
    used: int | None = None
    reserved: int | None = None
    process: int | None = None
    allocated: int | None = None
    allocated_peak: int | None = None
    pool: int | None = None
    pool_peak: int | None = None
    outside: int | None = None
    elsewhere: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """A line a figure, in GiB; reasons in place of figures that are missing."""
        lines = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "reasons":
                text = f"{cell(value):>12}" if isinstance(value, int) else value or f"- ({self.reasons[each.name]})"
                lines.append(f"{each.name:14} {text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Fields as builtin values, for JSON."""
        return asdict(self)


def memory_report(device: int | str | torch.device | None = None) -> MemoryReport:
    """Memory of a device now. Neither raises because of the machine nor starts CUDA.

    Args:
        device: CUDA device as torch numbers it; default: the current one.

    Returns:
        Figures, and reasons for those that cannot be had.

    Raises:
        ParameterError: `device` is not a device.

    Example:
        >>> report = memory_report()
        >>> report.total is not None or "total" in report.reasons
        True
    """
    index = device_index(device)
    if index is None:
        reason = f"{device} is not a CUDA device"
        return _merge(str(device), NvmlReading(reasons=dict.fromkeys(_NVML, reason)), {}, reason)
    return report_on(Nvml(index))


def report_on(nvml: Nvml) -> MemoryReport:
    """Report on a device that NVML has been asked to find."""
    pool, reason = allocator(nvml.index)
    reading = nvml.read()
    # the fallback takes a context on the device; where the allocator holds memory there is one
    if reading.total is None and pool.get("pool"):
        reading = _from_runtime(nvml.index, reading)
    return _merge(f"cuda:{nvml.index}", reading, pool, reason)


def device_index(device: Any) -> int | None:
    """Index of a CUDA device, None for a device of another kind."""
    if device is None:
        return torch.cuda.current_device() if cuda_started() else 0
    if isinstance(device, (str, torch.device)):
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ParameterError(f"device must be a torch device, got {quote(device)}") from error
        if parsed.type != "cuda":
            return None
        return device_index(None) if parsed.index is None else parsed.index
    if isinstance(device, bool) or not isinstance(device, int):
        raise ParameterTypeError(f"device must be an index or a torch device, got {quote(device)}")
    return check_int("device", device, minimum=0)


def allocator(index: int) -> tuple[dict[str, int], str]:
    """The allocator's figures, or none and why."""
    if not cuda_started():
        built = torch.version.cuda is not None
        return {}, "CUDA has not started in this process" if built else "this build of torch has no CUDA"
    try:
        stats = torch.cuda.memory_stats(index)
        return {name: int(stats[key]) for name, key in _ALLOCATOR.items()}, ""
    # other allocators keep other statistics, and a device may be lost: a report must not end the run
    except Exception as error:
        return {}, f"torch.cuda.memory_stats: {type(error).__name__}: {error}"


def _from_runtime(index: int, reading: NvmlReading) -> NvmlReading:
    try:
        free, total = torch.cuda.mem_get_info(index)
    # as above: whatever it is, NVML's reason stands
    except Exception:
        return reading
    reasons = {name: why for name, why in reading.reasons.items() if name not in ("api", "total", "free")}
    known = {name: getattr(reading, name) for name in ("name", "uuid", "found_by", "reserved", "process")}
    return NvmlReading(**known, api="cudaMemGetInfo", total=int(total), free=int(free), reasons=reasons)


def _merge(device: str, reading: NvmlReading, pool: dict[str, int], reason: str) -> MemoryReport:
    reasons = dict(reading.reasons)
    for name in _ALLOCATOR:
        if name not in pool:
            reasons[name] = reason
    used = None if reading.total is None or reading.free is None else reading.total - reading.free
    if used is None:
        reasons["used"] = reasons["total"]
    derived: dict[str, int | None] = {}
    for name, source, whole in (("outside", "process", reading.process), ("elsewhere", "used", used)):
        derived[name] = None
        if whole is None:
            reasons[name] = reasons[source]
        elif "pool" not in pool:
            reasons[name] = reason
        elif whole < pool["pool"]:
            reasons[name] = f"NVML's {source} is below the allocator's pool: they were not read at one moment"
        else:
            derived[name] = whole - pool["pool"]
    known: dict[str, Any] = {name: getattr(reading, name) for name in _NVML}
    return MemoryReport(device=device, used=used, reasons=reasons, **known | pool | derived)


def cell(value: Any) -> str:
    """Bytes as GiB, a dash for None."""
    if value is None:
        return "-"
    return f"{value / GIB:.3f} GiB" if isinstance(value, int) else str(value)
