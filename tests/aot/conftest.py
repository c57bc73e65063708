"""Kernels compiled for GPUs that are not there: `COMPILE_AHEAD=1 python -m pytest tests/aot`.

Minutes of compiling, so only on demand; not in a process that interprets kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("COMPILE_AHEAD") == "1" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return
    skip = pytest.mark.skip(reason="needs COMPILE_AHEAD=1 and no TRITON_INTERPRET: `make aot`")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
