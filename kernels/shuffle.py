"""The keyed bijection of [0, size) that shuffles a dataset, on the GPU: any part of an epoch's order alone.

A Feistel network over the two halves of the least number of bits, at least 8, that covers `size`; a place outside is
sent through again until it falls inside (`spec.shuffle` says why). Place 0..4 of an epoch of 10 under seed 42 hold:

    shuffle_places(0, 5, spec.round_keys(42, 0), 10, "cuda") -> [4, 2, 9, 3, 0]

A lane computes a place, in about 2**bits / size passes, at most 4; a program waits for its slowest lane. Each half has
at most 32 bits, so that the rounds are 32-bit arithmetic. Limits: size < 2**62.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from gpusampler.kernels import launch
from gpusampler.kernels.jit import FLAGS, kernel


@triton.jit
def mix32(x):
    """Mix 32 bits: `spec.mix32` on uint32, where products wrap by themselves."""
    x ^= x >> 16
    x = x * 0x7FEB352D
    x ^= x >> 15
    x = x * 0x846CA68B
    x ^= x >> 16
    return x


@kernel
def _shuffle_kernel(
    keys_ptr,
    out_ptr,
    start: tl.int64,
    count: tl.int64,
    size: tl.int64,
    low_bits: tl.int32,
    high_bits: tl.int32,
    ROUND_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    low_mask = ((tl.full([], 1, tl.int64) << low_bits) - 1).to(tl.uint32)
    high_mask = ((tl.full([], 1, tl.int64) << high_bits) - 1).to(tl.uint32)
    x = tl.where(inside, start + at, 0)
    walking = inside
    while tl.max(walking.to(tl.int32), 0) > 0:
        low = x.to(tl.uint32) & low_mask
        high = (x >> low_bits).to(tl.uint32)
        for r in tl.static_range(0, ROUND_KEYS, 2):
            high ^= mix32(low ^ tl.load(keys_ptr + r).to(tl.uint32)) & high_mask
            low ^= mix32(high ^ tl.load(keys_ptr + r + 1).to(tl.uint32)) & low_mask
        x = tl.where(walking, high.to(tl.int64) << low_bits | low.to(tl.int64), x)
        walking = inside & (x >= size)
    tl.store(out_ptr + at, x, mask=inside)


def shuffle_places(start: int, count: int, keys: np.ndarray, size: int, device: torch.device | str) -> torch.Tensor:
    """Shuffled samples at the places `start`, ..., `start + count - 1` of an epoch of `size` samples.

    Args:
        start: first place.
        count: places, with `start + count <= size`.
        keys: int64, the epoch's `spec.round_keys`; copied to the device through pinned memory, without waiting.
        size: samples of the dataset.
        device: where to compute.

    Returns:
        int64 [count], distinct numbers in [0, size).
    """
    device = torch.device(device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    if count == 0:
        return out
    on_host = torch.from_numpy(keys)
    on_device = on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
    bits = max(8, (size - 1).bit_length())
    block, num_warps = launch.SHUFFLE
    _shuffle_kernel[(triton.cdiv(count, block),)](
        on_device,
        out,
        start,
        count,
        size,
        bits // 2,
        bits - bits // 2,
        ROUND_KEYS=len(keys),
        BLOCK=block,
        num_warps=num_warps,
        **FLAGS,
    )
    return out
