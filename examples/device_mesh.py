"""Tensor-parallel peers train on the same rows: coordinates from a device mesh.

    torchrun --nproc-per-node=4 examples/device_mesh.py

Two data-parallel parts of two tensor-parallel processes each. All four agree on the plans (`process_group`, the world);
each process trains the part that its place in the mesh says (`dp_size`, `rank`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpusampler import GPUBatchRebalanceSampler, from_device_mesh


def main() -> None:
    """Iterate one epoch and compare with the peers."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    lengths = torch.randint(4, 200, (256,), generator=torch.Generator().manual_seed(0))

    dp_size, rank = from_device_mesh(mesh, "dp")
    sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=64, dp_size=dp_size, grad_accum=2, rank=rank)
    rows = sorted(sample for micro_batch in sampler for sample in micro_batch)

    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, rows)
    if dist.get_rank() == 0:
        peers = [process for process, other in enumerate(everyone) if other == rows]
        print(f"processes {peers} train the same {len(rows)} of 256 samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
