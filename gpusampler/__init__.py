"""Balanced, memory-bounded micro-batches for training on variable-length data.

from gpusampler import GPUBatchRebalanceSampler

sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=256, dp_size=8, grad_accum=4)
loader = DataLoader(dataset, batch_sampler=sampler)
"""

from gpusampler._version import __version__
from gpusampler.cost import CostModel
from gpusampler.group import PlanGroup, dp_coordinates
from gpusampler.lengths_from import lengths_from
from gpusampler.plan import BatchPlan, plan_batches
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.streaming import BalancedStream
from gpusampler.weights import microbatch_weight

__all__ = [
    "BalancedStream",
    "BatchPlan",
    "CostModel",
    "GPUBatchRebalanceSampler",
    "PlanGroup",
    "__version__",
    "dp_coordinates",
    "lengths_from",
    "microbatch_weight",
    "plan_batches",
]
