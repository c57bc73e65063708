"""torchdata: exact resume of a StatefulDataLoader, with workers too.

    loader = StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=4)
    first_epoch = resume(loader, state)     # state = loader.state_dict(), saved anywhere in an epoch

A StatefulDataLoader keeps the sampler's state by itself and restores it when it is iterated. `resume` also checks it at
once and tells the epoch to go on in, which the loader does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from gpusampler import state as states
from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.integrations._loaders import sampler_of


def resume(loader: StatefulDataLoader[Any], state: Mapping[str, Any]) -> int:
    """Load a state into a StatefulDataLoader with a `GPUBatchRebalanceSampler`.

    Args:
        loader: a loader with the same dataset, batch sampler and number of workers as the one that was saved.
        state: what its `state_dict` returned.

    Returns:
        The epoch to go on in: that of the state, or the next one if it was finished. The sampler is set to it.

    Raises:
        ParameterError: the state is not that of such a loader, or does not fit the sampler; it names the field.
    """
    if not isinstance(loader, StatefulDataLoader):
        raise ParameterTypeError(f"loader must be a StatefulDataLoader, got {quote(loader)}")
    sampler = sampler_of(loader)
    state = copy.deepcopy(dict(state)) if isinstance(state, Mapping) else state
    main = state.get("_snapshot", {}).get("_main_snapshot", state) if isinstance(state, dict) else {}
    position = main.get("_sampler_iter_state")
    if not isinstance(position, Mapping):
        raise ParameterError(f"state must be that of a StatefulDataLoader with a balancing sampler, got {quote(state)}")
    workers = main.get("_num_workers", 0)
    if workers != loader.num_workers:
        raise ParameterError(
            f"num_workers was {workers} when the state was saved and is {loader.num_workers} now: a StatefulDataLoader "
            "resumes with as many workers only"
        )
    epoch, _ = states.load(position, sampler.composition, sampler.partition, sampler.lengths)
    # With workers, what the loader keeps of the sampler itself lies behind by what they had under way, perhaps within a
    # step, where the accumulation could not change.
    main["_index_sampler_state"] = {name: value for name, value in position.items() if name != "handed"}
    loader.load_state_dict(state)
    epoch += bool(state["_iterator_finished"])
    sampler.set_epoch(epoch)
    return epoch
