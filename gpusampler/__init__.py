"""Balanced, memory-bounded micro-batches for training on variable-length data.

from gpusampler import GPUBatchRebalanceSampler

sampler = GPUBatchRebalanceSampler(lengths, effective_batch_size=256, dp_size=8, grad_accum=4)
loader = DataLoader(dataset, batch_sampler=sampler)
"""

from gpusampler._version import __version__
from gpusampler.batch_plan import BatchPlan
from gpusampler.cost import CostModel
from gpusampler.errors import DistributedError, NotAvailableError, ParameterError
from gpusampler.group import PlanGroup, from_device_mesh
from gpusampler.lengths_from import lengths_from
from gpusampler.plan import plan_batches
from gpusampler.sampler import GPUBatchRebalanceSampler
from gpusampler.stats import PlanStats
from gpusampler.streaming import BalancedStream
from gpusampler.weights import microbatch_weight

__all__ = [
    "BalancedStream",
    "BatchPlan",
    "CostModel",
    "DistributedError",
    "GPUBatchRebalanceSampler",
    "NotAvailableError",
    "ParameterError",
    "PlanGroup",
    "PlanStats",
    "__version__",
    "from_device_mesh",
    "lengths_from",
    "microbatch_weight",
    "plan_batches",
]
