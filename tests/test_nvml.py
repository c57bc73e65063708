"""NVML readings: a library that fails in every known way, and the right device under every numbering."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from fake_nvml import GIB, FakeLibrary, Gpu, install

from gpusampler.nvml import Nvml, NvmlReading, device_count

FIGURES = ("name", "uuid", "found_by", "api", "total", "free", "reserved", "process")
MEMORY = ("api", "total", "free", "reserved")
A, B, C, D = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abcd")
MIG = "MIG-377e0049-554c-540b-93c6-d0976f8426cb"


def four(**options: Any) -> FakeLibrary:
    return FakeLibrary([Gpu(uuid, free=(50 - i) * GIB, **options) for i, uuid in enumerate((A, B, C, D))])


def started_cuda(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    """CUDA as torch would report it, on a machine without."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])


def check_complete(reading: NvmlReading) -> None:
    """Each figure is there, or has a reason, and none is zero in place of unknown."""
    for name in FIGURES:
        value = getattr(reading, name)
        assert (value is None) == (name in reading.reasons), name
        assert value != 0


def test_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(A, processes={1: 5 * GIB, os.getpid(): 7 * GIB})
    install(monkeypatch, FakeLibrary([gpu]))
    assert Nvml(0).read() == NvmlReading(
        name="NVIDIA H100 80GB HBM3",
        uuid=A,
        found_by="index",
        api="nvmlDeviceGetMemoryInfo_v2",
        total=80 * GIB,
        free=50 * GIB,
        reserved=GIB // 2,
        process=7 * GIB,
    )
    gpu.free = 40 * GIB
    assert Nvml(0).read().free == 40 * GIB


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has NVML")
def test_L37_no_library_on_this_machine() -> None:
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()
    reading = Nvml(0).read()
    check_complete(reading)
    assert reading.reasons == dict.fromkeys(FIGURES, "NVML error 12: NVML Shared Library Not Found")
    assert device_count() == 0


@pytest.mark.parametrize("code", [2, 4, 8, 9, 10, 12, 15, 17, 18, 19, 20, 27, 999, 1234])
def test_L37_start_fails_with_any_code(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    library.fail["nvmlInitWithFlags"] = code
    reading = Nvml(0).read()
    check_complete(reading)
    assert set(reading.reasons) == set(FIGURES)
    assert reading.reasons["total"].startswith(f"NVML error {code}: ")
    # the driver comes back: the next device is found
    library.fail.clear()
    assert Nvml(0).read().total == 80 * GIB


@pytest.mark.parametrize("code", [3, 4, 6, 7, 9, 15, 16, 18, 999, 4321])
@pytest.mark.parametrize(
    ("function", "lost"),
    [
        ("nvmlDeviceGetMemoryInfo_v2", MEMORY),
        ("nvmlDeviceGetComputeRunningProcesses_v3", ("process",)),
        ("nvmlDeviceGetName", ("name",)),
        ("nvmlDeviceGetUUID", ("uuid",)),
        ("nvmlDeviceGetHandleByIndex_v2", FIGURES),
    ],
)
def test_L37_one_query_fails_and_the_others_answer(
    function: str, lost: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function.endswith("Processes_v3") and code == 7:
        pytest.skip("the code by which this function tells the size it needs")
    library = install(monkeypatch, FakeLibrary([Gpu(A, processes={os.getpid(): GIB})]))
    library.fail[function] = code
    reading = Nvml(0).read()
    check_complete(reading)
    assert set(reading.reasons) == set(lost)
    assert all(why.startswith(f"NVML error {code}: ") for why in reading.reasons.values())


@pytest.mark.parametrize("visible", [None, "1", f"{B},{A}", "GPU-bbbb", MIG])
@pytest.mark.parametrize("runs", [False, True])
def test_L37_no_code_of_any_call_is_an_exception(
    visible: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid=B[4:], pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    functions = [name.removeprefix("_") for name in vars(FakeLibrary) if name.startswith("_nvml")]
    for function in functions:
        for code in (1, 2, 3, 4, 6, 9, 12, 13, 15, 18, 25, 999, 31337):
            for lasting in (True, False):
                with monkeypatch.context() as patch:
                    library = install(patch, FakeLibrary([Gpu(A), Gpu(B)], parts=[Gpu(MIG)]), visible)
                    if runs:
                        started_cuda(patch, [properties])
                    library.fail[function] = code if lasting else [code]
                    check_complete(Nvml(0).read())
                    device_count()


def test_L37_a_gpu_is_lost_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    device = Nvml(0)
    assert device.read().total == 80 * GIB
    library.fail = {name.removeprefix("_"): 15 for name in vars(FakeLibrary) if name.startswith("_nvmlDevice")}
    lost = device.read()
    check_complete(lost)
    assert set(lost.reasons) == {*FIGURES} - {"found_by"}
    assert lost.reasons["total"].startswith("NVML error 15: ")
    library.fail = {}
    assert device.read().total == 80 * GIB


def test_L37_text_of_an_unknown_code_is_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    library.fail["nvmlDeviceGetMemoryInfo_v2"] = 777
    assert "text of error 777" in Nvml(0).read().reasons["total"]


def test_L37_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = Nvml(0).read()
    check_complete(reading)
    assert "nvidia-ml-py" in reading.reasons["total"]


@pytest.mark.parametrize("how", ["missing", 13, 25])
def test_L37_old_driver_has_version_1_of_the_memory_call(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    if how == "missing":
        library.missing.add("nvmlDeviceGetMemoryInfo_v2")
    else:
        library.fail["nvmlDeviceGetMemoryInfo_v2"] = how
    reading = Nvml(0).read()
    check_complete(reading)
    assert (reading.api, reading.total, reading.free) == ("nvmlDeviceGetMemoryInfo", 80 * GIB, 50 * GIB)
    assert "version 1" in reading.reasons["reserved"]


def test_L37_old_binding_has_version_1_of_the_memory_call(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, four())
    call = pynvml.nvmlDeviceGetMemoryInfo
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: call(handle))
    assert Nvml(0).read().api == "nvmlDeviceGetMemoryInfo"
    monkeypatch.delattr(pynvml, "nvmlMemory_v2")
    assert Nvml(0).read().api == "nvmlDeviceGetMemoryInfo"


def test_L37_a_binding_that_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, four())

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("cannot open shared object")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", broken)
    assert Nvml(0).read().reasons["total"] == "OSError: cannot open shared object"


def test_L37_unified_memory_reports_a_total_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, total=0, free=0, reserved=0)]))
    reading = Nvml(0).read()
    check_complete(reading)
    assert reading.total is None
    assert "total of 0" in reading.reasons["total"]


def test_someone_else_shut_nvml_down(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    device = Nvml(0)
    library.running = False
    check_complete(reading := device.read())
    assert reading.total == 80 * GIB
    assert len(library.asked("nvmlInitWithFlags")) == 2


def test_a_fork_starts_nvml_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four())
    Nvml(0).read()
    Nvml(0).read()
    assert len(library.asked("nvmlInitWithFlags")) == 1
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    Nvml(0).read()
    assert len(library.asked("nvmlInitWithFlags")) == 2


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(A, processes={})
    library = install(monkeypatch, FakeLibrary([gpu]))
    device = Nvml(0)
    assert "among the 0 processes" in device.read().reasons["process"]
    gpu.processes = {7: GIB, 8: GIB}
    assert "runs in a container" in device.read().reasons["process"]
    gpu.processes = {os.getpid(): None}
    assert "WDDM" in device.read().reasons["process"]
    gpu.processes = {os.getpid(): GIB}
    # the size grew between the two calls of the binding: asked again
    library.fail["nvmlDeviceGetComputeRunningProcesses_v3"] = [7, 7]
    assert device.read().process == GIB
    library.missing.add("nvmlDeviceGetComputeRunningProcesses_v3")
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    assert device.read().process == GIB
    assert library.asked("nvmlDeviceGetComputeRunningProcesses_v2")


def test_L38_indices_in_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, four(), visible="3,1")
    assert [Nvml(index).read().uuid for index in (0, 1)] == [D, B]
    assert library.asked("nvmlDeviceGetHandleByIndex_v2") == [3, 1]
    assert Nvml(0).found_by == "CUDA_VISIBLE_DEVICES"
    assert device_count() == 2
    third = Nvml(2).read()
    check_complete(third)
    assert third.reasons["total"] == "cuda:2 is not among the devices of CUDA_VISIBLE_DEVICES='3,1'"


def test_L38_mig_is_found_by_its_uuid_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(
        monkeypatch, FakeLibrary([Gpu(A, mig=1)], parts=[Gpu(MIG, total=10 * GIB, free=9 * GIB)]), visible=MIG
    )
    for _ in range(2):
        reading = Nvml(0).read()
        assert (reading.uuid, reading.total) == (MIG, 10 * GIB)
        assert library.asked("nvmlDeviceGetHandleByIndex_v2") == []
        # once CUDA runs, torch may still report the UUID of the whole GPU
        started_cuda(monkeypatch, [SimpleNamespace(uuid=A.removeprefix("GPU-"))])


def test_L38_old_names_of_mig_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    old = f"MIG-{A}/1/0"
    library = install(monkeypatch, FakeLibrary([Gpu(A)], parts=[Gpu(old, total=GIB, free=GIB // 2)]), visible=old)
    assert Nvml(0).read().total == GIB
    assert library.asked("nvmlDeviceGetHandleByIndex_v2") == []


def test_L38_a_divided_gpu_is_not_taken_for_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, mig=1), Gpu(B, mig=0)]))
    assert "divided (MIG)" in Nvml(0).read().reasons["total"]
    assert Nvml(1).read().uuid == B


def test_L38_torch_numbers_devices_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, FakeLibrary([Gpu(A), Gpu(B)]))
    started_cuda(monkeypatch, [SimpleNamespace(uuid=B[4:]), SimpleNamespace(uuid=A[4:])])
    assert [Nvml(index).read().uuid for index in (0, 1)] == [B, A]
    assert Nvml(0).found_by == "uuid"
    assert library.asked("nvmlDeviceGetHandleByIndex_v2") == []


def test_L38_mig_uuid_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLibrary([Gpu(A, mig=1)], parts=[Gpu(MIG, total=GIB, free=GIB // 2)]))
    started_cuda(monkeypatch, [SimpleNamespace(uuid=MIG.removeprefix("MIG-"))])
    assert Nvml(0).read().uuid == MIG


def test_L38_torch_without_uuids_tells_the_bus_address(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Gpu(A, pci="00000000:17:00.0"), Gpu(B, pci="00000001:CA:00.0".lower())]
    install(monkeypatch, FakeLibrary(devices))
    started_cuda(monkeypatch, [SimpleNamespace(pci_domain_id=1, pci_bus_id=0xCA, pci_device_id=0)])
    assert (Nvml(0).read().uuid, Nvml(0).found_by) == (B, "pci")
    started_cuda(monkeypatch, [SimpleNamespace()])
    assert (Nvml(0).read().uuid, Nvml(0).found_by) == (A, "index")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (f"{C},{A}", [C, A]),
        ("GPU-cccc,GPU-b", [C, B]),
        (" 2 , 0", [C, A]),
        ("1,-1,0", [B]),
        ("1,none,0", [B]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("0,1,0", []),
        (f"{A},{B},{A}", []),
        (f"2,{A}", [C]),
        (f"{B},0", [B]),
        ("1,9,0", [B]),
        ("9,1", []),
        ("99999999999999999999,1", []),
        ("1" * 5000, []),
        ("\u0661", []),
        ("+1", []),
        ("1 2", []),
        ("gpu-cccc", []),
        ("3,", [D]),
        (",3", []),
    ],
)
def test_L38_other_forms(visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, four(), visible=visible)
    assert [Nvml(index).read().uuid for index in range(device_count())] == expected
    beyond = Nvml(len(expected)).read()
    check_complete(beyond)
    assert beyond.total is None


@pytest.mark.parametrize("visible", ["GPU-", "GPU-eeee", "MIG-eeee", "9"])
def test_L38_names_of_no_device(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, four(), visible=visible)
    reading = Nvml(0).read()
    check_complete(reading)
    assert set(reading.reasons) == set(FIGURES)


def test_importing_loads_no_library_and_asking_starts_no_cuda() -> None:
    program = """
import pynvml, torch
import gpusampler.memory
assert pynvml.nvmlLib is None
gpusampler.memory.memory_report()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
