"""Every variant of every kernel that the launcher can produce, for compiling ahead of time.

Block sizes follow from the sizes of a problem through `launch`; here all sizes are gone through. Pointers' dtypes are
told by their names, which mean the same in all kernels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpusampler.kernels import costs, deal, emit, fill, improve, launch, search, shuffle, sort, spec, waste

_FLOATS = {"inverse_ptr", "custom_ptr", "costs_ptr", "bounds_ptr"}
_INTS = {
    "order_ptr",
    "sorted_ptr",
    "most_ptr",
    "shift_ptr",
    "counts_ptr",
    "usable_ptr",
    "fits_ptr",
    "walked_ptr",
    "place_ptr",
    "offsets_ptr",
    "starts_ptr",
    "by_length_ptr",
    "packed_ptr",
}


class Variant(NamedTuple):
    """A kernel, the dtypes of its arguments, and its constants."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int

    @property
    def name(self) -> str:
        """The kernel's name, without its underscore and suffix."""
        name: str = self.function.fn.__name__
        return name.removeprefix("_").removesuffix("_kernel")

    @property
    def label(self) -> str:
        """What tells this variant from others of the kernel."""
        constants = [f"{name.lower()}={int(value)}" for name, value in self.constants.items()]
        dtypes = [self.signature[name] for name in self.signature if name == "lengths_ptr"]
        return " ".join(constants + [dtype.removeprefix("*") for dtype in dtypes])


def _variant(function: Any, num_warps: int, lengths: str = "", **constants: Any) -> Variant:
    signature = {}
    for parameter in function.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif not parameter.name.endswith("_ptr"):
            signature[parameter.name] = parameter.annotation_type
        elif parameter.name == "lengths_ptr":
            signature[parameter.name] = f"*{lengths}"
        else:
            is_int = parameter.name in _INTS
            signature[parameter.name] = "*fp64" if parameter.name in _FLOATS else "*i32" if is_int else "*i64"
    return Variant(function, signature, constants, num_warps)


def _powers(most: int) -> list[int]:
    return [1 << bits for bits in range(most.bit_length())]


def variants(chip: int) -> Iterator[Variant]:
    """All variants for a chip of compute capability `chip`, 90 for 9.0, each once."""
    yield _variant(
        shuffle._shuffle_kernel, launch.SHUFFLE.num_warps, ROUND_KEYS=spec.ROUND_KEYS, BLOCK=launch.SHUFFLE.block
    )
    for lengths in ("i32", "i64"):
        for key_bytes in (4, 8):
            sorts = {launch.sort_shape(size, key_bytes, launch.SHARED_BYTES[chip]) for size in _powers(launch.MAX_SORT)}
            for shape in sorted(shape for shape in sorts if shape is not None):
                packed = key_bytes == 4
                yield _variant(sort._sort_rows_kernel, shape.num_warps, lengths, PACKED=packed, BLOCK=shape.block)
        yield _variant(sort._sort_halves_kernel, launch.HALF.num_warps, lengths, BLOCK=launch.HALF.block)
        for custom in (False, True):
            shape = launch.COSTS
            yield _variant(costs._costs_kernel, shape.num_warps, lengths, CUSTOM=custom, BLOCK=shape.block)
    yield _variant(sort._merge_halves_kernel, launch.HALF.num_warps, BLOCK=launch.HALF.block)
    yield _variant(search._min_max_kernel, launch.PROBES.num_warps, PROBES=launch.PROBES.block)
    yield _variant(fill._fill_kernel, launch.PROBES.num_warps, PROBES=launch.PROBES.block)
    yield _variant(waste._limit_kernel, launch.COSTS.num_warps, BLOCK=launch.COSTS.block)
    yield _variant(waste._waste_kernel, launch.WASTES.num_warps, DEPTH=launch.WASTES.block.bit_length() - 1)
    for slots in _powers(launch.MAX_SLOTS)[1:]:
        walk = launch.walk_shape(slots)
        yield _variant(improve._walk_kernel, walk.num_warps, LANES=walk.lanes, SLOTS=walk.slots)
    for block, num_warps in sorted({launch.group_shape(groups) for groups in _powers(launch.MAX_GROUPS)}):
        for function in (improve._start_kernel, deal._deal_kernel, deal._even_kernel, emit._places_kernel):
            yield _variant(function, num_warps, BLOCK=block)
        yield _variant(
            improve._settle_kernel,
            num_warps,
            CANDIDATES=launch.power_of_two(max(spec.CANDIDATES, spec.MANY_CANDIDATES)),
            TARGETS=launch.power_of_two(len(spec.TARGETS)),
            BLOCK=block,
        )
    yield _variant(emit._copy_kernel, launch.COPY.num_warps, BLOCK=launch.COPY.block)
