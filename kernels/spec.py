"""The planner as plain integer loops: the specification, and the engine for machines without a GPU.

One row is one global batch. `plan_rows` takes its lengths through five steps, each a function below: **sort** (longest
first, ties by position), **scale** (costs to int64), **search** (sizes of the K groups), **deal** (groups to slots and
ranks), **emit** (order, offsets, costs). Longest first, contiguous groups are optimal over all partitions, both for
the largest and for the summed group cost, so a plan is the sizes of K consecutive groups.

Search. A *walk* tests a vector of G levels, one a slot, D groups each: at each position it takes the slot with quota
left whose level is wasted least, and as many samples as that level holds. The start is the exact min-max over all K
groups (bisection; with one slot this is the answer), one of two partitions of equal padding waste or, where groups
are small, of two that fill slot after slot as low as what is left allows. Then ROUNDS rounds of
candidate level vectors, each round around the best plan so far: a wide scan of the costliest slot's level, pairs of
levels moved against each other, and single levels lowered. The candidates of a round do not depend on each other, so
that an engine may walk them, at every target in TARGETS, side by side.

No float decides anything: `estimate` uses a reciprocal and corrects it, so that the quotient is exact.
Complexity of a row: O(B log B) to sort, O(ROUNDS * candidates * K * G) to search. Limits: B * largest cost < 2**62,
lengths below 2**31, B and K below 2**31. Longer than a file should be, because of `compiled`.

A cost that every micro-batch has, whatever is in it, changes no choice here and is left to the caller.
"""

from __future__ import annotations

import numpy as np

from gpusampler.kernels.compiled import compiled

ROUNDS = 12
CANDIDATES = 32  # a round
MANY_CANDIDATES = 96  # where there are more than two levels to find and a walk is at most SMALL_K groups long
SMALL_K = 32
# Largest change of a pair of levels, in 1/65536 of a level, one a round: 0.5 down to 0.01, geometric.
STEPS = np.array([32768, 22967, 16097, 11282, 7908, 5542, 3885, 2723, 1908, 1338, 937, 655], dtype=np.int64)
# Tried reductions of the summed levels, in 1/65536, smallest first.
TARGETS = np.array([1, 4, 16, 64, 256, 1024, 4096, 16384, 32768, 49152], dtype=np.int64)
# Largest group cost over the mean for the two equal-waste starts, in quarters; 0 is no bound.
WASTE_CAPS = np.array([0, 6], dtype=np.int64)
# The same for the partitions tried when ranks meet once a step.
STEP_WASTE_CAPS = np.array([5, 6, 7, 8, 10, 12], dtype=np.int64)
PEAK_GROUPS = 32
# Rows of fewer samples a group than this are also started slot by slot, levels raised by each of these, in eighths.
SCARCE = 8
RAISES = np.array([0, 1], dtype=np.int64)
ROUND_KEYS = 8  # of the shuffle
SWAPS = 16  # at most, to even out the ranks when they meet once a step
NOISE = 0xE6D2B755
MAX_SHIFT = 40
MIN_SHIFT = -60

OK = 0
# Statuses of rows that only an engine which cannot raise gets to see: a length below 1 or above the longest allowed;
# costs that do not fit the integers, or leave `alpha` fewer than MIN_ALPHA_UNITS; given costs that are not all
# positive, finite and nondecreasing in the length.
BAD_LENGTHS = -1
OUT_OF_RANGE = -2
BAD_COSTS = -3
MIN_ALPHA_UNITS = 16

_MASK32 = 0xFFFFFFFF
_MASK24 = 0xFFFFFF


def round_keys(seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Keys of the shuffle of an epoch: ROUND_KEYS numbers of 32 bits from two of 64 bits (`splitmix64`), int64."""
    mask = (1 << 64) - 1
    state = seed & mask
    keys = []
    for i in range(1 + ROUND_KEYS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        if i == 0:
            state = z ^ (epoch & mask)
        else:
            keys.append(z >> 32)
    return np.array(keys, dtype=np.int64)


@compiled
def mix32(x):
    """Mix the low 32 bits of `x` (the `lowbias32` constants): a bijection of [0, 2**32)."""
    x &= _MASK32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    x ^= x >> 16
    return x


@compiled
def shuffle(start, keys, size, out):
    """Write the shuffled places of `start`, `start + 1`, ... to `out`: elements of a keyed bijection of [0, size).

    A Feistel network of ROUND_KEYS rounds over the least number of bits, at least 8, that covers `size`;
    an image outside is sent through again until it falls inside, which keeps the map a bijection. Any element is
    computed alone. Fewer than 8 bits would leave too few round functions: orders of small sets would be biased. All
    orders of a set of 2**bits have one parity, as in any Feistel network; nothing else is known to tell them apart.
    """
    bits = 8
    while size > 1 << bits:
        bits += 1
    low_bits = bits // 2
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << (bits - low_bits)) - 1
    for i in range(out.shape[0]):
        x = start + i
        while True:
            low = x & low_mask
            high = x >> low_bits
            for r in range(0, keys.shape[0], 2):
                high ^= mix32(low ^ keys[r]) & high_mask
                low ^= mix32(high ^ keys[r + 1]) & low_mask
            x = high << low_bits | low
            if x < size:
                break
        out[i] = x


@compiled
def noise(step, candidate, slot):
    """A fixed number in [0, 65536) for each (round, candidate, slot): the same on every device.

    NOISE was chosen among a few thousand values: any of them gives the same mean quality to 2e-4, with this one no
    window of the recorded set is dealt worse than by the best peer (`python -m bench quality`).
    """
    return mix32(step * 0x9E3779B1 + candidate * 0x85EBCA77 + slot * 0xC2B2AE3D + NOISE) >> 16


@compiled
def fraction(value, part, whole):
    """`value * part / whole` to 24 bits of the ratio, without leaving int64; 0 <= part <= whole < 2**39."""
    ratio = (part << 24) // whole
    return (value >> 24) * ratio + (((value & _MASK24) * ratio) >> 24)


@compiled
def sort_row(lengths, order):
    """Fill `order` with the positions of a row, longest first, ties by smaller position.

    [3, 1, 4, 1, 5, 9, 2, 6, 5] -> [5, 7, 4, 8, 2, 0, 6, 1, 3]
    """
    size = lengths.shape[0]
    bits = 0
    while (1 << bits) < size:
        bits += 1
    longest = np.int64(0)
    for i in range(size):
        longest = max(longest, lengths[i])
    keys = np.empty(size, np.int64)
    for i in range(size):
        keys[i] = ((longest - lengths[i]) << bits) | i
    keys.sort()
    for i in range(size):
        order[i] = keys[i] & ((1 << bits) - 1)


@compiled
def shift_for_lengths(longest, size, alphas):
    """The largest shift s with size * (longest * 2**s + alphas[s] * longest**2) < 2**62, or -1."""
    limit = (1 << 62) // size - 1
    for shift in range(MAX_SHIFT, -1, -1):
        if longest > limit >> shift:
            continue
        room = limit - (longest << shift)
        if alphas[shift] > 0 and longest * longest > room // alphas[shift]:
            continue
        return shift
    return -1


@compiled
def shift_for_costs(largest, size):
    """The largest shift s with size * largest * 2**s below 2**61; float64 times 2**s is exact."""
    limit = 2.0**61 / size
    for shift in range(MAX_SHIFT, MIN_SHIFT, -1):
        if largest * 2.0**shift <= limit:
            return shift
    return MIN_SHIFT


@compiled
def estimate(level, cost, inverse):
    """`level // cost`, exactly below 2**50: a float64 quotient is off by less than one, the remainder corrects it."""
    count = np.int64(level * inverse)
    rest = level - count * cost
    if rest < 0:
        return count - 1
    if rest >= cost:
        return count + 1
    return count


@compiled
def walk_level(level, f, inverse, most, groups, start, counts):
    """Fill groups of cost at most `level` from `start`; True if `groups` of them, none empty, hold what is left."""
    size = f.shape[0]
    i = start
    for k in range(groups):
        n = min(estimate(level, f[i], inverse[i]), most[i], size - i - (groups - 1 - k))
        if n < 1:
            return False
        counts[k] = n
        i += n
    return i == size


@compiled
def min_max(f, inverse, most, groups, counts):
    """The smallest level that `groups` groups can keep, by bisection; fills `counts`; -1 if the cap forbids any."""
    size = f.shape[0]
    high = f[0] * size
    if not walk_level(high, f, inverse, most, groups, 0, counts):
        return np.int64(-1)
    low = max(f[0], -(-f.sum() // groups)) - 1
    step = low // 16 + 1
    while low + step < high:
        if walk_level(low + step, f, inverse, most, groups, 0, counts):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = low + (high - low) // 2
        if walk_level(middle, f, inverse, most, groups, 0, counts):
            high = middle
        else:
            low = middle
    walk_level(high, f, inverse, most, groups, 0, counts)
    return high


@compiled
def walk_waste(waste, level, f, tail, most, groups, counts):
    """Fill groups of padding waste at most `waste` and cost at most `level`; True if they hold the row."""
    size = f.shape[0]
    i = 0
    n = 1
    for k in range(groups):
        limit = min(most[i], size - i - (groups - 1 - k))
        n = min(n, limit)
        while n < limit and (n + 1) * f[i] <= level and (n + 1) * f[i] - (tail[i] - tail[i + n + 1]) <= waste:
            n += 1
        while n > 1 and (n * f[i] > level or n * f[i] - (tail[i] - tail[i + n]) > waste):
            n -= 1
        counts[k] = n
        i += n
    return i == size


@compiled
def equal_waste(level, f, tail, most, groups, counts):
    """Groups of equal padding waste, the padding-minimal shape, none dearer than `level`; False if that is impossible.

    The waste is found by bisection to 12 bits: it bounds no cost, so that more would buy nothing.
    """
    low = np.int64(-1)
    high = f[0] * f.shape[0]
    if not walk_waste(high, level, f, tail, most, groups, counts):
        return False
    while high - low > 1 + (high >> 12):
        middle = low + (high - low) // 2
        if walk_waste(middle, level, f, tail, most, groups, counts):
            high = middle
        else:
            low = middle
    return walk_waste(high, level, f, tail, most, groups, counts)


@compiled
def walk_slots(levels, by_ratio, shift, f, inverse, tail, most, dp_size, counts, quota, weight, open_slots, scaled):
    """Test a vector of levels: at each position the open slot that wastes least takes all it can hold.

    Waste is the part of the level left over, relative to the level if `by_ratio`, else absolute, without its low
    `shift` bits; ties go to the earlier slot. Gives up as soon as the samples left cost more than the levels left.
    True if the row fits. The last four arguments are scratch, one element a slot.
    """
    size = f.shape[0]
    slots = levels.shape[0]
    room = np.int64(0)
    for s in range(slots):
        quota[s] = dp_size
        open_slots[s] = s
        scaled[s] = levels[s]
        room += levels[s] * dp_size
        weight[s] = (1 << 46) // max(1, levels[s] >> shift) if by_ratio else 1
    num_open = slots
    i = 0
    free = size - slots * dp_size + 1
    for k in range(counts.shape[0]):
        if tail[i] > room:
            return False
        cost = f[i]
        limit = min(most[i], free - i)
        best = -1
        best_n = np.int64(0)
        best_waste = np.int64(0)
        for a in range(num_open):
            s = open_slots[a]
            n = np.int64(scaled[s] * inverse[i])
            rest = levels[s] - n * cost
            if rest < 0:
                n -= 1
                rest += cost
            elif rest >= cost:
                n += 1
                rest -= cost
            if n > limit:
                n = limit
                rest = levels[s] - n * cost
            if n < 1:
                continue
            waste = (rest >> shift) * weight[s]
            if best < 0 or waste < best_waste:
                best = a
                best_n = n
                best_waste = waste
        if best < 0:
            return False
        s = open_slots[best]
        room -= levels[s]
        quota[s] -= 1
        if quota[s] == 0:
            num_open -= 1
            for a in range(best, num_open):
                open_slots[a] = open_slots[a + 1]
        counts[k] = best_n
        i += best_n
        free += 1
    return i == size


@compiled
def group_costs(f, counts, costs):
    """Padded cost of each group: its size times the cost of its longest sample."""
    i = 0
    for k in range(counts.shape[0]):
        costs[k] = counts[k] * f[i]
        i += counts[k]


@compiled
def slot_levels(f, counts, dp_size, costs, levels):
    """Levels that a partition reaches once its groups are dealt by cost, costliest slot first; returns their sum."""
    group_costs(f, counts, costs)
    costs.sort()
    groups = costs.shape[0]
    total = np.int64(0)
    for s in range(levels.shape[0]):
        levels[s] = costs[groups - 1 - s * dp_size]
        total += levels[s]
    return total


@compiled
def propose(step, candidate, num_lowered, best, total, target, longest, levels):
    """Levels of one candidate that sum to about `target`, below the best plan's `total`.

    The first `num_lowered` candidates lower one level alone. The even ones scan the level of the costliest slot from
    the longest sample to 7/8 of the target, the other slots random. The odd ones raise one level and lower another.
    """
    slots = best.shape[0]
    for s in range(slots):
        levels[s] = best[s]
    if candidate < num_lowered:
        levels[candidate] = max(1, best[candidate] - (total - target))
    elif candidate % 2 == 0:
        low = max(longest, target // slots // 8 * 5)
        high = max(low, target // 8 * 7)
        levels[0] = low + fraction(high - low, noise(step, candidate, 0), 65536)
        weights = np.int64(0)
        for s in range(1, slots):
            levels[s] = 65536 + noise(step, candidate, s)
            weights += levels[s]
        for s in range(1, slots):
            levels[s] = fraction(target - levels[0], levels[s], weights)
    else:
        down = noise(step, candidate, 1) * slots >> 16
        up = (down + 1 + (noise(step, candidate, 2) * (slots - 1) >> 16)) % slots
        change = fraction(best[up], STEPS[step] * noise(step, candidate, 0) >> 16, 65536)
        levels[up] += change
        levels[down] = max(1, best[down] - change - (total - target))


@compiled
def improve(f, inverse, tail, most, dp_size, counts, levels, total):
    """ROUNDS rounds of candidates from the levels of a partition; overwrites `counts` with the best one found.

    In a round the candidates are tried in order at the smallest target not yet reached; one that fits is tried at the
    next, until it does not. The last that fitted, at the last target reached, is the new best.
    """
    slots = levels.shape[0]
    groups = slots * dp_size
    candidates = MANY_CANDIDATES if slots > 2 and groups <= SMALL_K else CANDIDATES
    num_lowered = min(slots, candidates // 4)
    trial = np.empty(slots, np.int64)
    quota = np.empty(slots, np.int64)
    weight = np.empty(slots, np.int64)
    open_slots = np.empty(slots, np.int64)
    trial_counts = np.empty(groups, np.int64)
    scaled = np.empty(slots, np.float64)
    costs = np.empty(groups, np.int64)
    for step in range(ROUNDS):
        shift = 0
        while total >> shift >= 1 << 31:
            shift += 1
        reached = 0
        winner = -1
        for candidate in range(candidates):
            while reached < TARGETS.shape[0]:
                target = total - (total >> 16) * TARGETS[reached]
                propose(step, candidate, num_lowered, levels, total, target, f[0], trial)
                by_ratio = candidate // 3 % 2 == 0
                if not walk_slots(
                    trial,
                    by_ratio,
                    shift,
                    f,
                    inverse,
                    tail,
                    most,
                    dp_size,
                    trial_counts,
                    quota,
                    weight,
                    open_slots,
                    scaled,
                ):
                    break
                counts[:] = trial_counts
                reached += 1
                winner = candidate
        if winner >= 0:
            total = slot_levels(f, counts, dp_size, costs, levels)
    return total


@compiled
def deal_microbatch(costs, dp_size, slots, place):
    """Groups by cost, D a slot, costliest slot first; within a slot the dearest goes to the rank with least so far.

    `place[slot * dp_size + rank]` is the group. Ties: the earlier group counts as dearer, the smaller rank as lighter.
    """
    by_cost = np.argsort(-costs, kind="mergesort")
    load = np.zeros(dp_size, np.int64)
    for s in range(slots):
        ranks = np.argsort(load, kind="mergesort")
        for d in range(dp_size):
            k = by_cost[s * dp_size + d]
            place[s * dp_size + ranks[d]] = k
            load[ranks[d]] += costs[k]


@compiled
def swap_ranks(costs, dp_size, slots, place):
    """At most SWAPS exchanges of a group of the heaviest rank for a cheaper one elsewhere, each the best there is."""
    load = np.zeros(dp_size, np.int64)
    for s in range(slots):
        for d in range(dp_size):
            load[d] += costs[place[s * dp_size + d]]
    for _ in range(SWAPS):
        heavy = 0
        for d in range(dp_size):
            if load[d] > load[heavy]:
                heavy = d
        best = load[heavy]
        give = -1
        take = -1
        for s in range(slots):
            mine = costs[place[s * dp_size + heavy]]
            for at in range(slots * dp_size):
                less = mine - costs[place[at]]
                if less <= 0:
                    continue
                height = max(load[heavy] - less, load[at % dp_size] + less)
                if height < best and at % dp_size != heavy:
                    best = height
                    give = s * dp_size + heavy
                    take = at
        if give < 0:
            return
        less = costs[place[give]] - costs[place[take]]
        load[heavy] -= less
        load[take % dp_size] += less
        place[give], place[take] = place[take], place[give]


@compiled
def sort_slots(costs, dp_size, slots, place):
    """Order each rank's groups costliest first, ties by group, so that memory peaks early."""
    for d in range(dp_size):
        for s in range(1, slots):
            k = place[s * dp_size + d]
            t = s
            while t > 0:
                other = place[(t - 1) * dp_size + d]
                if costs[other] > costs[k] or (costs[other] == costs[k] and other < k):
                    break
                place[t * dp_size + d] = other
                t -= 1
            place[t * dp_size + d] = k


@compiled
def step_height(costs, dp_size, slots, place):
    """The largest rank total of a deal."""
    height = np.int64(0)
    for d in range(dp_size):
        total = np.int64(0)
        for s in range(slots):
            total += costs[place[s * dp_size + d]]
        height = max(height, total)
    return height


@compiled
def deal_step(costs, dp_size, slots, place):
    """Deal for ranks that meet once a step: even out the rank totals; returns the largest."""
    deal_microbatch(costs, dp_size, slots, place)
    swap_ranks(costs, dp_size, slots, place)
    sort_slots(costs, dp_size, slots, place)
    return step_height(costs, dp_size, slots, place)


@compiled
def limit_peak(lengths, most, counts):
    """Lower `most` so that no group peaks above the min-max partition by more than K / PEAK_GROUPS of its peak.

    With few groups, unequal levels would buy little time for much memory.
    """
    peak = np.int64(0)
    i = 0
    for k in range(counts.shape[0]):
        peak = max(peak, counts[k] * lengths[i])
        i += counts[k]
    peak += peak * counts.shape[0] // PEAK_GROUPS
    for i in range(lengths.shape[0]):
        most[i] = min(most[i], max(1, peak // lengths[i]))


@compiled
def fill_slots(eighths, f, inverse, most, dp_size, counts):
    """Fill slot after slot to the least level that the groups left can keep, raised; False if samples are left over.

    Costs [9, 4, 4, 1, 1] on one rank in four slots, not raised: sizes [1, 1, 1, 2], where the min-max partition has
    [1, 2, 1, 1].
    """
    size = f.shape[0]
    groups = counts.shape[0]
    i = 0
    for first in range(0, groups, dp_size):
        level = min_max(f[i:], inverse[i:], most[i:], groups - first, counts[first:])
        level += level // 8 * eighths
        for k in range(first, first + dp_size):
            count = min(estimate(level, f[i], inverse[i]), most[i])
            counts[k] = max(1, min(count, size - i - (groups - 1 - k)))
            i += counts[k]
    return i == size


@compiled
def search_row(lengths, f, inverse, tail, most, dp_size, slots, counts):
    """Sizes of the groups for ranks that meet in every slot; False if the cap forbids `dp_size * slots` groups.

    Lowers `most` to what `limit_peak` allows.
    """
    groups = dp_size * slots
    if min_max(f, inverse, most, groups, counts) < 0:
        return False
    if slots == 1:
        return True
    limit_peak(lengths, most, counts)
    costs = np.empty(groups, np.int64)
    levels = np.empty(slots, np.int64)
    trial = np.empty(groups, np.int64)
    trial_levels = np.empty(slots, np.int64)
    total = slot_levels(f, counts, dp_size, costs, levels)
    raises = RAISES if f.shape[0] < SCARCE * groups else RAISES[:0]
    for number in range(len(raises) + len(WASTE_CAPS)):
        if number < len(raises):
            whole = fill_slots(raises[number], f, inverse, most, dp_size, trial)
        else:
            level = waste_level(WASTE_CAPS[number - len(raises)], f, tail, groups)
            whole = equal_waste(level, f, tail, most, groups, trial)
        if whole:
            trial_total = slot_levels(f, trial, dp_size, costs, trial_levels)
            if trial_total < total:
                total = trial_total
                counts[:] = trial
                levels[:] = trial_levels
    improve(f, inverse, tail, most, dp_size, counts, levels, total)
    return True


@compiled
def waste_level(cap, f, tail, groups):
    """The bound on a group's cost that a quarter count `cap` of the mean stands for; 0 is no bound."""
    if cap == 0:
        return f[0] * f.shape[0]
    return max(f[0], tail[0] // groups // 4 * cap)


@compiled
def refine_step(f, tail, most, dp_size, slots, counts, costs, place):
    """Under one meeting a step, take an equal-waste partition instead if its deal is lower; fills `place`."""
    groups = dp_size * slots
    group_costs(f, counts, costs)
    height = deal_step(costs, dp_size, slots, place)
    trial = np.empty(groups, np.int64)
    trial_costs = np.empty(groups, np.int64)
    trial_place = np.empty(groups, np.int64)
    for cap in STEP_WASTE_CAPS:
        if equal_waste(waste_level(cap, f, tail, groups), f, tail, most, groups, trial):
            group_costs(f, trial, trial_costs)
            trial_height = deal_step(trial_costs, dp_size, slots, trial_place)
            if trial_height < height:
                height = trial_height
                counts[:] = trial
                costs[:] = trial_costs
                place[:] = trial_place


@compiled
def plan_rows(
    lengths,
    custom,
    alphas,
    dp_size,
    slots,
    max_tokens,
    per_step,
    order,
    offsets,
    costs,
    tokens,
    bounds,
    status,
):
    """Plan each row of `lengths` on its own; a row's plan depends on nothing but the row.

    Args:
        lengths: int64 [W, B].
        custom: float64 [W, B], the cost of each sample, or [0, 0] for `length + alpha * length**2`.
        alphas: int64 [MAX_SHIFT + 1], alpha times 2**shift, rounded.
        dp_size: ranks, D.
        slots: accumulation slots, G.
        max_tokens: largest n * longest of a micro-batch, 0 for none; a longer sample goes alone.
        per_step: ranks meet once a step rather than in every slot.
        order: int32 [W, B], out: positions, group by group, longest first within a group.
        offsets: int32 [W, K + 1], out: group `slot * D + rank` is `order[offsets[k]:offsets[k + 1]]`.
        costs: float64 [W, G, D], out: in the unit of a sample's cost.
        tokens: int64 [W, G, D], out: n * longest.
        bounds: float64 [W, 2], out: lower bound of the step cost whatever the grouping, and the step cost.
        status: int64 [W], out: OK, or the least number of groups under `max_tokens` if that is above K: there is no
            plan then, order is -1, offsets and tokens are 0, costs and bounds nan.
    """
    size = lengths.shape[1]
    groups = dp_size * slots
    by_length = np.empty(size, np.int64)
    sorted_lengths = np.empty(size, np.int64)
    f = np.empty(size, np.int64)
    inverse = np.empty(size, np.float64)
    tail = np.zeros(size + 1, np.int64)
    most = np.empty(size, np.int64)
    counts = np.empty(groups, np.int64)
    starts = np.empty(groups + 1, np.int64)
    whole = np.empty(groups, np.int64)
    place = np.empty(groups, np.int64)
    for w in range(lengths.shape[0]):
        sort_row(lengths[w], by_length)
        for i in range(size):
            sorted_lengths[i] = lengths[w, by_length[i]]
        if custom.shape[0] > 0:
            shift = scale_costs(custom[w], by_length, f)
        else:
            shift = scale_lengths(sorted_lengths, alphas, f)
        for i in range(size - 1, -1, -1):
            inverse[i] = 1.0 / f[i]
            tail[i] = tail[i + 1] + f[i]
            most[i] = max(1, max_tokens // sorted_lengths[i]) if max_tokens > 0 else size
        if not search_row(sorted_lengths, f, inverse, tail, most, dp_size, slots, counts):
            status[w] = least_groups(most)
            order[w], offsets[w], tokens[w] = -1, 0, 0
            costs[w], bounds[w] = np.nan, np.nan
            continue
        status[w] = OK
        group_costs(f, counts, whole)
        if per_step:
            refine_step(f, tail, most, dp_size, slots, counts, whole, place)
        else:
            deal_microbatch(whole, dp_size, slots, place)
        starts[0] = 0
        for k in range(groups):
            starts[k + 1] = starts[k] + counts[k]
        unit = 2.0**-shift
        bound = max(-(-tail[0] // dp_size), f[0])
        bounds[w, 0] = bound * unit
        bounds[w, 1] = step_cost(whole, dp_size, slots, per_step, place) * unit
        emit_row(
            sorted_lengths,
            by_length,
            starts,
            whole,
            place,
            unit,
            order[w],
            offsets[w],
            costs[w],
            tokens[w],
        )


@compiled
def scale_lengths(lengths, alphas, f):
    """Costs `length + alpha * length**2` of a sorted row as integers; returns the shift they are scaled by."""
    shift = shift_for_lengths(lengths[0], lengths.shape[0], alphas)
    for i in range(lengths.shape[0]):
        f[i] = (lengths[i] << shift) + alphas[shift] * lengths[i] * lengths[i]
    return shift


@compiled
def scale_costs(row, by_length, f):
    """Costs given as float64 of a sorted row as integers of at least 1; returns the shift they are scaled by."""
    shift = shift_for_costs(row[by_length[0]], row.shape[0])
    unit = 2.0**shift
    for i in range(row.shape[0]):
        f[i] = max(1, np.int64(np.rint(row[by_length[i]] * unit)))
    return shift


@compiled
def least_groups(most):
    """The least number of groups that can hold a sorted row under the cap: greedy, longest first."""
    i = 0
    groups = 0
    while i < most.shape[0]:
        i += most[i]
        groups += 1
    return groups


@compiled
def step_cost(costs, dp_size, slots, per_step, place):
    """Largest rank total if ranks meet once a step, else the sum over slots of the largest group."""
    if per_step:
        return step_height(costs, dp_size, slots, place)
    total = np.int64(0)
    for s in range(slots):
        highest = np.int64(0)
        for d in range(dp_size):
            highest = max(highest, costs[place[s * dp_size + d]])
        total += highest
    return total


@compiled
def emit_row(lengths, by_length, starts, whole, place, unit, order, offsets, costs, tokens):
    """Write the groups of a row in the order of their places."""
    dp_size = costs.shape[1]
    at = 0
    offsets[0] = 0
    for p in range(place.shape[0]):
        k = place[p]
        costs[p // dp_size, p % dp_size] = whole[k] * unit
        tokens[p // dp_size, p % dp_size] = (starts[k + 1] - starts[k]) * lengths[starts[k]]
        for i in range(starts[k], starts[k + 1]):
            order[at] = by_length[i]
            at += 1
        offsets[p + 1] = at


@compiled
def least_padded(f, groups):
    """The least summed cost of exactly `groups` groups of a sorted row, a lower bound of every plan's.

    The cost of a group, its size times its largest f, is Monge, so that the best cut moves forward with the end:
    divide and conquer over ends, O(K B log B).
    """
    size = f.shape[0]
    huge = np.int64(1) << np.int64(62)
    before = np.full(size + 1, huge, np.int64)
    after = np.empty(size + 1, np.int64)
    stack = np.empty((256, 4), np.int64)
    before[0] = 0
    for k in range(1, groups + 1):
        after[:] = huge
        depth = 1
        stack[0] = (k, size, k - 1, size)
        while depth > 0:
            depth -= 1
            low, high, first, last = stack[depth]
            if low > high:
                continue
            end = (low + high) // 2
            best = huge
            best_cut = first
            for cut in range(first, min(end - 1, last) + 1):
                if before[cut] < huge:
                    value = before[cut] + (end - cut) * f[cut]
                    if value < best:
                        best = value
                        best_cut = cut
            after[end] = best
            stack[depth] = (low, end - 1, first, best_cut)
            stack[depth + 1] = (end + 1, high, best_cut, last)
            depth += 2
        before, after = after, before
    return before[size]


@compiled
def groups_needed(lengths, cap):
    """The least number of groups each row of `lengths` splits into under `cap`; int64 [W]."""
    needed = np.empty(lengths.shape[0], np.int64)
    order = np.empty(lengths.shape[1], np.int64)
    most = np.empty(lengths.shape[1], np.int64)
    for w in range(lengths.shape[0]):
        sort_row(lengths[w], order)
        for i in range(order.shape[0]):
            most[i] = max(1, cap // lengths[w, order[i]])
        needed[w] = least_groups(most)
    return needed
