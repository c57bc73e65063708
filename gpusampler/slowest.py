"""Which shape a time belongs to, where ranks wait for each other and all measure that of the slowest.

O(m D) for m micro-batches on D ranks, and each of some values of `alpha`.
"""

from __future__ import annotations

import numpy as np

from gpusampler.regression import Floats

_ALPHAS = np.concatenate([[0.0], np.geomspace(1e-6, 1e-1, 41)])


def slowest_shapes(records: Floats) -> Floats:
    """Records of ranks that waited for each other, reduced to the shape that each time belongs to.

    For a given `alpha` the costliest shape of a micro-batch is known, and time is linear in its cost; the `alpha` whose
    line fits best, by the median of its relative errors, decides.

    Args:
        records: float64 [m, D, 3], samples, length and seconds of m micro-batches on D ranks.

    Returns:
        float64 [m, 3]: the costliest rank's shape, and the median of the times over ranks.

    Example:
        Two ranks; a time is that of the costlier shape at alpha = 0.001:

        >>> shapes = np.array([[(8, 100), (1, 700)], [(4, 200), (1, 900)], [(2, 400), (1, 500)], [(9, 100), (1, 400)]])
        >>> cost = shapes[..., 0] * (shapes[..., 1] + 0.001 * shapes[..., 1] ** 2)
        >>> seconds = np.broadcast_to(cost.max(axis=1)[:, None, None], (4, 2, 1))
        >>> slowest_shapes(np.concatenate([shapes, seconds], axis=2))[:, :2].astype(int).tolist()
        [[1, 700], [1, 900], [2, 400], [9, 100]]
    """
    samples, length, _ = np.moveaxis(records, 2, 0)
    seconds = np.median(records[..., 2], axis=1)
    best, least = np.zeros(len(records), dtype=np.int64), np.inf
    for alpha in _ALPHAS:
        costs = samples * length * (1.0 + alpha * length)
        slowest = costs.argmax(axis=1)
        design = np.stack([np.ones_like(seconds), costs.max(axis=1)], axis=1) / seconds[:, None]
        line = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
        error = float(np.median(np.abs(1.0 - design @ line)))
        if error < least:
            best, least = slowest, error
    rows = np.arange(len(records))
    return np.stack([samples[rows, best], length[rows, best], seconds], axis=1)
