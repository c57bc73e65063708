"""Trajectory carry: walk a sampling grid one rung a call and keep the trajectory between the calls.

Methods that distil or roll out along their own sampling grid need states on every rung of it. A full walk pays
`num_steps` generation forwards a call; a carried walk pays one, because the state reached is kept for the next call.
One trajectory is kept for each accumulation slot, the same slot for which the sampler yields its micro-batches.

`snapshot` copies loader batches, `slots` holds the trajectories, `ranks` and `streams` say how many there are and
where each starts, `renoise` moves a prediction to the next rung, `sizes` compares batches, and `loop` puts the whole
cycle behind one call.
"""

from gpusampler.carry.loop import CarryLoop, CarryStep
from gpusampler.carry.ranks import carry_rank_world, stagger_rank_and_groups
from gpusampler.carry.renoise import ode_renoise, rectified_flow, sde_renoise
from gpusampler.carry.slots import CarryMemory, TrajectoryCarry
from gpusampler.carry.snapshot import snapshot_raw_batch
from gpusampler.carry.streams import parse_carry_slots, stagger_offset, validate_carry_coverage

__all__ = [
    "CarryLoop",
    "CarryMemory",
    "CarryStep",
    "TrajectoryCarry",
    "carry_rank_world",
    "ode_renoise",
    "parse_carry_slots",
    "rectified_flow",
    "sde_renoise",
    "snapshot_raw_batch",
    "stagger_offset",
    "stagger_rank_and_groups",
    "validate_carry_coverage",
]
