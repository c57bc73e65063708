"""The third level: which system of a group a step reads, in the forms that users of deepmd-kit know.

`auto_prob` is a string: "prob_uniform" gives every system the same probability; "prob_sys_size" gives each a
probability in proportion to its batches; "prob_sys_size;start:end:weight;..." splits the list into blocks, whose
weights are normalised and shared within a block in proportion to batches. A system outside every block has probability
0. `sys_probs` is a list with one entry a system, in which negative entries share what the others leave of 1, in
proportion to batches. Everything is exact and O(systems); at most one of the two forms is given.

Blocks that overlap or end beyond the list, a block with weight and no batches, and a rest that no system takes raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from fractions import Fraction
from functools import cached_property
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, check_int, quote
from gpusampler.tasks.count import Batches, check_batches, count_steps, resolve_batches
from gpusampler.tasks.draws import IndependentDraws, check_step, mix
from gpusampler.tasks.exact import MAX_STEPS, SUM_SLACK, as_floats, exact_float, nominal_epoch, normalise, share_rest

_FORMS = '"prob_uniform", "prob_sys_size" or "prob_sys_size;start:end:weight;..."'
_SYSTEM_LEVEL = 3


def system_probabilities(
    sizes: Sequence[int], auto_prob: str = "prob_sys_size", sys_probs: Sequence[float] | None = None
) -> tuple[Fraction, ...]:
    """Probability of each system of a group; `sys_probs`, where given, takes the place of `auto_prob`.

    Args:
        sizes: Batches of each system.
        auto_prob: "prob_uniform", "prob_sys_size", or "prob_sys_size;start:end:weight;..." with `end` excluded.
        sys_probs: Probability of each system; negative entries share the rest.

    Raises:
        ParameterError: The form is unknown or cannot be honoured.

    Example:
        >>> [str(p) for p in system_probabilities([2, 1, 3], "prob_sys_size;0:1:0.5;1:3:0.5")]
        ['1/2', '1/8', '3/8']
        >>> [str(p) for p in system_probabilities([2, 1, 3], sys_probs=[0.5, -1, -1])]
        ['1/2', '1/8', '3/8']
    """
    sizes = [
        check_int(f"sizes[{i}]", size, minimum=0, maximum=MAX_STEPS) for i, size in enumerate(as_list("sizes", sizes))
    ]
    if not sizes:
        raise ParameterError("systems must not be empty, got 0 systems")
    if sys_probs is not None:
        return _listed(sizes, as_list("sys_probs", sys_probs))
    if not isinstance(auto_prob, str):
        raise ParameterTypeError(f"auto_prob must be {_FORMS}, got {quote(auto_prob)}")
    style, *blocks = (part.strip() for part in auto_prob.split(";"))
    if style == "prob_uniform" and not blocks:
        return (Fraction(1, len(sizes)),) * len(sizes)
    if style == "prob_sys_size" and not blocks:
        return normalise([Fraction(size) for size in sizes], "batches of the systems")
    if style == "prob_sys_size":
        return _blocks(sizes, auto_prob, blocks)
    raise ParameterError(f"auto_prob must be {_FORMS}, got {quote(auto_prob)}")


def as_list(name: str, values: Any) -> list[Any]:
    """The entries of a list, an array or a generator.

    Raises:
        ParameterTypeError: It has none, or they have no order.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        raise ParameterTypeError(f"{name} must be a list, got {quote(values)}")
    try:
        return list(values)
    except TypeError as error:  # an array without dimensions
        raise ParameterTypeError(f"{name} must be a list, got {quote(values)}") from error


def _listed(sizes: Sequence[int], sys_probs: Sequence[float]) -> tuple[Fraction, ...]:
    if len(sys_probs) != len(sizes):
        raise ParameterError(
            f"sys_probs must have one entry for each of the {len(sizes)} systems, got {len(sys_probs)}"
        )
    values = [exact_float(f"sys_probs[{i}]", p) for i, p in enumerate(sys_probs)]
    given = [p if p >= 0 else None for p in values]
    if None not in given and abs(sum((p for p in given if p is not None), Fraction(-1))) > SUM_SLACK:
        raise ParameterError(
            f"sys_probs must sum to 1, or have negative entries that share the rest, got {quote(as_floats(values))}"
        )
    return share_rest(given, sizes, "sys_probs")


def _blocks(sizes: Sequence[int], auto_prob: str, blocks: Sequence[str]) -> tuple[Fraction, ...]:
    parsed = [_block(index, text, len(sizes)) for index, text in enumerate(blocks)]
    weights = normalise([weight for _, _, weight in parsed], f"block weights of auto_prob {quote(auto_prob)}")
    probabilities = [Fraction(0)] * len(sizes)
    covered_by: dict[int, int] = {}
    for index, ((start, end, _), weight) in enumerate(zip(parsed, weights, strict=True)):
        size = sum(sizes[start:end])
        if weight > 0 and size == 0:
            raise ParameterError(f"auto_prob block {index} ({blocks[index]!r}) has weight and no batches")
        for system in range(start, end):
            if system in covered_by:
                raise ParameterError(
                    f"auto_prob blocks {covered_by[system]} and {index} ({blocks[index]!r}) both hold system {system}"
                )
            covered_by[system] = index
            probabilities[system] = weight * sizes[system] / size if size else Fraction(0)
    return tuple(probabilities)


def _block(index: int, text: str, num_systems: int) -> tuple[int, int, Fraction]:
    try:
        start_text, end_text, weight_text = text.split(":")
        start, end, weight = int(start_text), int(end_text), float(weight_text)
    except ValueError:
        raise ParameterError(f"auto_prob block {index} must read start:end:weight, got {text!r}") from None
    if not 0 <= start < end <= num_systems:
        raise ParameterError(f"auto_prob block {index} must have 0 <= start < end <= {num_systems}, got {text!r}")
    return start, end, exact_float(f"weight of auto_prob block {index}", weight, minimum=0.0)


class SystemGroup:
    """Systems that are drawn with given probabilities, as one workload.

    Batches are counted, and probabilities found, when they are first needed: an error then names the task, and a task
    that is excluded raises none. A group of which no system has batches has length 0 and cannot be drawn from.

    Args:
        systems: Batches of each system in optimizer steps: an int, a callable, or a sampler, as in `Source`.
        auto_prob: How the probabilities follow from the batches.
        sys_probs: The probabilities themselves; takes the place of `auto_prob`.
        names: What errors and reports call the systems; their positions by default.
        grad_accum: Micro-batches an optimizer step, for samplers that do not say.

    Raises:
        ParameterError: A value is out of range; on first use, the probabilities cannot be honoured.

    Example:
        >>> group = SystemGroup([2, 1, 3], "prob_sys_size;0:1:0.5;1:3:0.5")
        >>> len(group), group.probabilities
        (8, [0.5, 0.125, 0.375])
    """

    def __init__(
        self,
        systems: Iterable[Batches],
        auto_prob: str = "prob_sys_size",
        sys_probs: Sequence[float] | None = None,
        *,
        names: Sequence[str] | None = None,
        grad_accum: int | None = None,
    ) -> None:
        self._systems = as_list("systems", systems)
        number = len(self._systems)
        self.names = tuple([f"system {i}" for i in range(number)] if names is None else as_list("names", names))
        if len(self.names) != number:
            raise ParameterError(f"names must have one entry for each of {number} systems, got {len(self.names)}")
        for index, (system, name) in enumerate(zip(self._systems, self.names, strict=True)):
            if not isinstance(name, str):
                raise ParameterTypeError(f"names[{index}] must be a string, got {quote(name)}")
            check_batches(system, name)
        self.grad_accum_of_systems = None if grad_accum is None else check_int("grad_accum", grad_accum, minimum=1)
        self._auto_prob = auto_prob
        self._sys_probs = None if sys_probs is None else as_list("sys_probs", sys_probs)
        self._draws: tuple[int, IndependentDraws] | None = None

    @cached_property
    def workloads(self) -> tuple[int | Sized, ...]:
        """The count or sampler of each system, callables called once."""
        return tuple(resolve_batches(system, name) for system, name in zip(self._systems, self.names, strict=True))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Optimizer steps of one pass over each system."""
        loads = zip(self.workloads, self.names, strict=True)
        return tuple(count_steps(load, name, self.grad_accum_of_systems) for load, name in loads)

    @cached_property
    def exact(self) -> tuple[Fraction, ...]:
        """Probability of each system, exact; all 0 if none has batches."""
        if not any(self.sizes):
            return (Fraction(0),) * len(self.sizes)
        return system_probabilities(self.sizes, self._auto_prob, self._sys_probs)

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of a nominal epoch: every system is then expected to have been seen in full."""
        return nominal_epoch(self.sizes, self.exact, self.names)

    @property
    def probabilities(self) -> list[float]:
        """Probability of each system."""
        return as_floats(self.exact)

    def __len__(self) -> int:
        """`num_steps`."""
        return self.num_steps

    def get_nsystems(self) -> int:
        """Number of systems: what the legacy policy counts."""
        return len(self._systems)

    def system_at(self, step: int, seed: int) -> int:
        """System drawn at `step`, from (seed, step) alone.

        Args:
            step: Global optimizer step.
            seed: Key of this group's draws.
        """
        check_int("seed", seed)
        if not any(self.sizes):
            raise ParameterError(f"none of the {len(self.sizes)} systems has batches to draw")
        if self._draws is None or self._draws[0] != seed:
            self._draws = seed, IndependentDraws(self.exact, mix(seed, _SYSTEM_LEVEL))
        return self._draws[1].at(check_step(step))
