"""Several tasks, one sampling policy that every rank shares: nominal epochs in optimizer steps, not dataset sizes.

Three levels draw apart: a task each step, a source (group) in the task, a system in the group. `resolve_task_schedule`
turns tasks into probabilities and draws; `MultiTaskBatchSampler` iterates them over the tasks' own samplers.
"""

from gpusampler.tasks.adapters import System, array_systems, make_source, record_systems
from gpusampler.tasks.config import schedule_from_config
from gpusampler.tasks.exact import nominal_epoch
from gpusampler.tasks.expected import ExpectedVisits, expected_visits
from gpusampler.tasks.iterate import TaskBatch
from gpusampler.tasks.policies import POLICIES, POLICY_VERSION, resolve_task_schedule
from gpusampler.tasks.sampler import MultiTaskBatchSampler
from gpusampler.tasks.schedule import Drawn, TaskSchedule
from gpusampler.tasks.source import EmptyTaskError, Source, Task
from gpusampler.tasks.systems import SystemGroup, system_probabilities

__all__ = [
    "POLICIES",
    "POLICY_VERSION",
    "Drawn",
    "EmptyTaskError",
    "ExpectedVisits",
    "MultiTaskBatchSampler",
    "Source",
    "System",
    "SystemGroup",
    "Task",
    "TaskBatch",
    "TaskSchedule",
    "array_systems",
    "expected_visits",
    "make_source",
    "nominal_epoch",
    "record_systems",
    "resolve_task_schedule",
    "schedule_from_config",
    "system_probabilities",
]
