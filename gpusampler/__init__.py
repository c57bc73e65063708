"""Balanced, memory-bounded micro-batches for training on variable-length data."""

from gpusampler._version import __version__

__all__ = ["__version__"]
