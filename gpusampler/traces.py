"""Real length traces that come with the package, for the demo and for a first look without data of one's own.

Sources, commits, licences and how the lengths were computed are in `data/ATTRIBUTION.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpusampler.errors import check_choice

TRACES = ("alpaca_eval_rollouts", "mooncake_conversation")
"""Names that `load_trace` takes."""

_FOLDER = Path(__file__).parent / "data"


def load_trace(name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Lengths in tokens of the samples of a public dataset.

    Args:
        name: one of `TRACES`.

    Returns:
        int32 [N], in the order of the source.

    Raises:
        ParameterError: no such trace.

    Example:
        >>> lengths = load_trace("alpaca_eval_rollouts")
        >>> len(lengths), int(lengths.max())
        (176295, 8440)
    """
    check_choice("name", name, TRACES)
    with np.load(_FOLDER / f"{name}.npz") as archive:
        lengths: np.ndarray[Any, np.dtype[np.int32]] = archive["lengths"]
    return lengths
