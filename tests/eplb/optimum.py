"""The best placements there are, found without the code under test: by trying all, and by HiGHS."""

from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


@cache
def all_placements(num_experts: int, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """int64 ``[K, R, S]``: every placement with replicas apart, up to the order of the ranks."""
    on_rank = combinations(range(num_experts), slots_per_rank)
    placements = np.array(list(combinations_with_replacement(on_rank, num_ranks)))
    return placements[replica_counts(placements, num_experts).min(1) > 0]


def replica_counts(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """``[K, E]``, of ``slots`` ``[K, R, S]``."""
    return (slots[..., None] == np.arange(num_experts)).sum((1, 2))


def max_loads(loads: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``[K]``: the heaviest rank of each of ``slots`` ``[K, R, S]``, under loads ``[E]``."""
    shares = loads / replica_counts(slots, len(loads))
    return np.take_along_axis(shares[:, None], slots, 2).sum(2).max(1)


def least_max_load(loads: np.ndarray, num_ranks: int, slots_per_rank: int) -> float:
    """The heaviest rank of the best of all placements of a few experts with loads ``[E]``."""
    return float(max_loads(loads, all_placements(len(loads), num_ranks, slots_per_rank)).min())


def bound_by_ilp(loads: np.ndarray, num_ranks: int, slots_per_rank: int, gap: float) -> float:
    """A load that no placement's heaviest rank is below, and some is within ``gap`` of.

    Binary ``count[e, c]``: expert e has c replicas; ``on[e, c, r]``: one of them is on rank r.
    Columns: all counts, all of on, and the largest load of a rank, which is minimised.
    """
    num_experts = len(loads)
    most = min(num_ranks, num_ranks * slots_per_rank - num_experts + 1)
    options = [(e, c) for e in range(num_experts) for c in range(1, most + 1)]
    largest = len(options) * (1 + num_ranks)
    rows: list[tuple[dict[int, float], float, float]] = []

    def on(option: int, rank: int) -> int:
        return len(options) + option * num_ranks + rank

    for e in range(num_experts):
        rows.append(({i: 1 for i, (of, _) in enumerate(options) if of == e}, 1, 1))
    for i, (_, c) in enumerate(options):
        rows.append(({on(i, r): 1 for r in range(num_ranks)} | {i: -c}, 0, 0))
        rows += [({on(i, r): 1, i: -1}, -np.inf, 0) for r in range(num_ranks)]
    for r in range(num_ranks):
        rows.append(({on(i, r): 1 for i in range(len(options))}, slots_per_rank, slots_per_rank))
        load = {on(i, r): loads[e] / c for i, (e, c) in enumerate(options)}
        rows.append((load | {largest: -1}, -np.inf, 0))
        if r:  # the ranks in falling order of load: one of many equal solutions
            before = {on(i, r - 1): -loads[e] / c for i, (e, c) in enumerate(options)}
            rows.append((load | before, -np.inf, 0))
    return _solve(rows, largest, loads.sum() / num_ranks, gap)


def _solve(
    rows: list[tuple[dict[int, float], float, float]], largest: int, mean: float, gap: float
) -> float:
    row_idx = [i for i, (entries, _, _) in enumerate(rows) for _ in entries]
    columns = [column for entries, _, _ in rows for column in entries]
    values = [value for entries, _, _ in rows for value in entries.values()]
    matrix = csr_array((values, (row_idx, columns)), shape=(len(rows), largest + 1))
    constraints = LinearConstraint(matrix, [low for _, low, _ in rows], [high for *_, high in rows])
    is_largest = np.arange(largest + 1) == largest
    result = milp(
        is_largest.astype(float),
        constraints=constraints,
        integrality=~is_largest,
        bounds=Bounds(np.where(is_largest, mean, 0), np.where(is_largest, np.inf, 1)),
        options={"mip_rel_gap": gap, "time_limit": 100},
    )
    assert result.status == 0, result.message
    return float(result.mip_dual_bound)
