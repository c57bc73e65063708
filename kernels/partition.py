"""Balanced partition: samples into K groups of nearly equal summed cost, as plain integer loops.

Where samples are concatenated (packed rows, RL micro-batches) a group costs the sum of its samples, and a good plan is
a multiway number partition. Two starts: largest first onto the least loaded group (Graham 1969), and the largest
differencing method (Karmarkar and Karp 1982), which is better when groups hold few samples of similar cost. Each start
is improved: while it lowers the largest group, a sample of that group is moved away or exchanged for a cheaper one.
The start with the smaller largest group wins.

`cap` bounds the summed `sizes` of a group, a second quantity beside the cost. Where largest first cannot keep it, the
groups start from first-fit decreasing, which needs at most 11/9 of the least number of groups plus 6/9 (Dosa 2007).

Everything is deterministic: ties go to the smaller sample, then to the smaller group. Complexity: O(n log n) for
largest first, O(n K) for differencing (left out above DIFFERENCING_LIMIT), and a bounded number of exchanges looked at,
WORK_A_SAMPLE * n but at most MOST_WORK a start. Limits: costs and sizes >= 1, their sums below 2**62.

Example: costs 5 5 4 3 3 in two groups. Largest first makes 5+4 and 5+3+3; exchanging 5 for 4 makes 5+5 and 4+3+3:

    >>> partition(np.array([5, 5, 4, 3, 3]), 2).tolist()
    [0, 0, 1, 1, 1]
"""

from __future__ import annotations

import heapq

import numpy as np

from gpusampler.kernels.compiled import compiled

WORK_A_SAMPLE = 512
MOST_WORK = 1 << 25
DIFFERENCING_LIMIT = 1 << 26
NO_CAP = (1 << 62) - 1


def partition(costs: np.ndarray, groups: int, *, equal_size: bool = False) -> np.ndarray:
    """Group of each sample, int64 [n], so that the largest summed cost is small and no group is empty.

    Args:
        costs: int64 [n], each >= 1, sum below 2**62.
        groups: K, 1 to n.
        equal_size: every group holds n / K samples; n must be a multiple of K.
    """
    group_of = np.empty(costs.shape[0], np.int64)
    order = largest_first(costs)
    balance(costs, costs, NO_CAP, order, order, groups, equal_size, group_of)
    return group_of


def partition_capped(costs: np.ndarray, sizes: np.ndarray, cap: int, groups: int) -> np.ndarray:
    """As `partition`, with the summed `sizes` of every group at most `cap`.

    `groups` must be at least `groups_needed(sizes, cap)`, every size at most `cap`.
    """
    group_of = np.empty(costs.shape[0], np.int64)
    balance(costs, sizes, cap, largest_first(costs), largest_first(sizes), groups, False, group_of)
    return group_of


def groups_needed(sizes: np.ndarray, cap: int) -> int:
    """Groups into which first-fit decreasing packs `sizes`, int64 [n], each 1 to `cap`.

    Example:
        >>> groups_needed(np.array([4, 4, 3, 3, 2]), 8)
        2
    """
    return int(pack(sizes, cap, largest_first(sizes), np.empty(sizes.shape[0], np.int64)))


def largest_first(values: np.ndarray) -> np.ndarray:
    """Positions of `values`, largest first, ties by position."""
    return np.argsort(-values, kind="stable")


@compiled
def balance(costs, sizes, cap, order, by_size, groups, equal_size, group_of):
    """Write the group of each sample to `group_of`; `order` and `by_size` sort costs and sizes, largest first."""
    n = costs.shape[0]
    if not place_largest_first(costs, sizes, cap, order, groups, equal_size, group_of):
        used = pack(sizes, cap, by_size, group_of)
        split(costs, order, groups, used, group_of)
    best = improve(costs, sizes, cap, groups, equal_size, group_of)
    floor = max(costs[order[0]], -(-costs.sum() // groups))
    if best == floor or n * groups > DIFFERENCING_LIMIT:
        return
    other = np.empty(n, np.int64)
    difference(costs, order, groups, equal_size, other)
    if sums_of(sizes, other, groups).max() <= cap and improve(costs, sizes, cap, groups, equal_size, other) < best:
        group_of[:] = other


@compiled
def sums_of(values, group_of, groups):
    """Sum of `values` over each group."""
    sums = np.zeros(groups, np.int64)
    for i in range(values.shape[0]):
        sums[group_of[i]] += values[i]
    return sums


@compiled
def place_largest_first(costs, sizes, cap, order, groups, equal_size, group_of):
    """Each sample onto the least loaded group with room for it; False if there is none."""
    most = costs.shape[0] // groups if equal_size else costs.shape[0]
    count = np.zeros(groups, np.int64)
    filled = np.zeros(groups, np.int64)
    heap = [(np.int64(0), np.int64(k)) for k in range(groups)]
    for i in order:
        full = [(np.int64(0), np.int64(0)) for _ in range(0)]
        while heap and filled[heap[0][1]] + sizes[i] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return False
        load, k = heapq.heappop(heap)
        group_of[i] = k
        count[k] += 1
        filled[k] += sizes[i]
        if count[k] < most:
            heapq.heappush(heap, (load + costs[i], k))
        for entry in full:
            heapq.heappush(heap, entry)
    return True


@compiled
def pack(sizes, cap, by_size, group_of):
    """First-fit decreasing: each sample into the first group with room; returns the number of groups.

    `room` is a tree over the groups whose node holds the most room of any group below it.
    """
    n = sizes.shape[0]
    leaves = 1
    while leaves < n:
        leaves *= 2
    room = np.full(2 * leaves, cap, np.int64)
    used = 0
    for i in by_size:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < sizes[i]:
                node += 1
        group_of[i] = node - leaves
        used = max(used, node - leaves + 1)
        room[node] -= sizes[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return used


@compiled
def split(costs, order, groups, used, group_of):
    """Halve the costliest groups of two samples or more until there are `groups` of them."""
    loads = sums_of(costs, group_of, groups)
    count = np.zeros(groups, np.int64)
    for k in group_of:
        count[k] += 1
    for new in range(used, groups):
        old = -1
        for k in range(new):
            if count[k] > 1 and (old < 0 or loads[k] > loads[old]):
                old = k
        loads[old] = 0
        count[old] = 0
        for i in order:
            if group_of[i] == old:
                k = old if loads[old] <= loads[new] else new
                group_of[i] = k
                loads[k] += costs[i]
                count[k] += 1


@compiled
def difference(costs, order, groups, equal_size, group_of):
    """Largest differencing method: join the two states whose loads are most apart, high loads with low ones.

    A state is a partition of some samples: a chain of its loads that are not 0, highest first. An entry is named after
    its first sample; all chains together have at most n entries.
    """
    n = costs.shape[0]
    load = costs.copy()
    after = np.full(n, -1, np.int64)  # next entry of a state
    first_of_state = np.empty(n, np.int64)
    next_sample = np.full(n, -1, np.int64)  # next sample of an entry
    last_sample = np.arange(n)
    step = groups if equal_size else 1
    heap = [(np.int64(0), np.int64(0)) for _ in range(0)]
    for s in range(0, n, step):
        for t in range(s, s + step - 1):
            after[order[t]] = order[t + 1]
        first_of_state[s] = order[s]
        heap.append((-spread(load, after, first_of_state[s], groups), np.int64(s)))
    heapq.heapify(heap)
    entries = np.empty(2 * groups, np.int64)
    while len(heap) > 1:
        s = heapq.heappop(heap)[1]
        other = heapq.heappop(heap)[1]
        count = 0
        entry = first_of_state[s]
        while entry >= 0:
            entries[count] = entry
            count += 1
            entry = after[entry]
        more = 0
        entry = first_of_state[other]
        while entry >= 0:
            more += 1
            at = groups - more
            if at < count:
                host = entries[at]
                load[host] += load[entry]
                next_sample[last_sample[host]] = entry
                last_sample[host] = last_sample[entry]
            else:
                entries[groups + more - 1] = entry
            entry = after[entry]
        free = min(more, groups - count)
        for t in range(free):
            entries[count + t] = entries[groups + t]
        count += free
        chain(entries, count, load, after)
        first_of_state[s] = entries[0]
        heapq.heappush(heap, (-spread(load, after, entries[0], groups), s))
    entry = first_of_state[heap[0][1]]
    k = 0
    while entry >= 0:
        i = entry
        while i >= 0:
            group_of[i] = k
            i = next_sample[i]
        entry = after[entry]
        k += 1


@compiled
def spread(load, after, entry, groups):
    """Highest load of a state less its lowest, which is 0 if it has fewer entries than groups."""
    highest = load[entry]
    count = 1
    while after[entry] >= 0:
        entry = after[entry]
        count += 1
    return highest - load[entry] if count == groups else highest


@compiled
def chain(entries, count, load, after):
    """Sort entries, nearly sorted already, by load, highest first, and link them."""
    for t in range(1, count):
        entry = entries[t]
        at = t
        while at > 0 and load[entries[at - 1]] < load[entry]:
            entries[at] = entries[at - 1]
            at -= 1
        entries[at] = entry
    for t in range(count - 1):
        after[entries[t]] = entries[t + 1]
    after[entries[count - 1]] = -1


@compiled
def improve(costs, sizes, cap, groups, equal_size, group_of):
    """Lower the largest group by the best move or exchange with one of its samples, while there is one; returns it."""
    loads = sums_of(costs, group_of, groups)
    filled = sums_of(sizes, group_of, groups)
    first = np.full(groups, -1, np.int64)  # chains of the samples of each group
    after = np.empty(costs.shape[0], np.int64)
    for i in range(costs.shape[0] - 1, -1, -1):
        link(first, after, group_of[i], i)
    work = min(WORK_A_SAMPLE * costs.shape[0], MOST_WORK)
    while True:
        high = np.argmax(loads)
        give, take, to, seen = best_exchange(costs, sizes, cap, loads, filled, first, after, high, not equal_size)
        work -= seen
        if give < 0 or work < 0:
            return loads[high]
        move(costs, sizes, loads, filled, first, after, group_of, give, to)
        if take >= 0:
            move(costs, sizes, loads, filled, first, after, group_of, take, high)


@compiled
def best_exchange(costs, sizes, cap, loads, filled, first, after, high, moves):
    """(sample to give, sample to take or -1, group, pairs seen) that makes the larger of two groups smallest, or -1.

    The lightest group is looked at first: groups that could not do better even if they met `high` halfway are skipped.
    With `moves`, a sample may also go to a group for nothing.
    """
    best = loads[high]
    give, take, to = -1, -1, -1
    groups = loads.shape[0]
    lightest = np.argmin(loads)
    seen = groups
    for turn in range(groups):
        k = (lightest + turn) % groups
        if (loads[high] + loads[k] + 1) // 2 >= best:
            continue
        mover = first[high]
        alone = after[mover] < 0
        while mover >= 0:
            other = first[k]
            while True:
                less = costs[mover] - (costs[other] if other >= 0 else 0)
                extra = sizes[mover] - (sizes[other] if other >= 0 else 0)
                height = max(loads[high] - less, loads[k] + less)
                allowed = other >= 0 or (moves and not alone)
                if height < best and allowed and filled[k] + extra <= cap and filled[high] - extra <= cap:
                    best = height
                    give, take, to = mover, other, k
                seen += 1
                if other < 0:
                    break
                other = after[other]
            mover = after[mover]
    return give, take, to, seen


@compiled
def move(costs, sizes, loads, filled, first, after, group_of, i, to):
    """Take sample `i` out of its group and put it into another."""
    old = group_of[i]
    if first[old] == i:
        first[old] = after[i]
    else:
        at = first[old]
        while after[at] != i:
            at = after[at]
        after[at] = after[i]
    link(first, after, to, i)
    group_of[i] = to
    loads[old] -= costs[i]
    loads[to] += costs[i]
    filled[old] -= sizes[i]
    filled[to] += sizes[i]


@compiled
def link(first, after, k, i):
    """Put sample `i` at the head of the chain of group `k`."""
    after[i] = first[k]
    first[k] = i
