"""Every example in a docstring of the package runs and says what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gpusampler
import gpusampler.kernels


def modules() -> list[str]:
    """All modules; an editable installation holds the kernels in a folder of their own."""
    names = {gpusampler.__name__, gpusampler.kernels.__name__}
    for package in (gpusampler, gpusampler.kernels):
        names |= {found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
    return sorted(name for name in names if not name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_examples_of(name: str):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "gpusampler":
            raise
        pytest.skip(f"{name} needs {error.name}")  # an optional dependency
    result = doctest.testmod(module)
    assert result.failed == 0


def test_the_kernels_are_found():
    assert {"gpusampler.kernels.spec", "gpusampler.kernels.checks", "gpusampler.sampler"} <= set(modules())
