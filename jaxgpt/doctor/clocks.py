"""Difference of the hosts' clocks, by which logs, checkpoints and file times are compared."""

import time
from collections.abc import Callable, Sequence

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.checks import Check, ok, warn

ROUNDS = 10
TOLERATED = 1.0  # seconds


def clock_check(cluster: ProcessGroup, clock: Callable[[], float] = time.time) -> Check:
    """Measure and evaluate the clocks of all processes."""
    if len(set(cluster.hosts)) == 1:
        return ok("clocks", "one host, one clock")
    rounds = []
    for _ in range(ROUNDS):
        entered = cluster.allgather(clock())
        rounds.append((entered, cluster.allgather(clock())))
    return evaluate(offsets(rounds), cluster.host_names)


Times = Sequence[float]


def offsets(rounds: Sequence[tuple[Times, Times]]) -> list[tuple[float, float]]:
    """Return by how many seconds each process's clock is ahead of process 0's, and the error.

    In every round all processes meet: none leaves before the last has entered. So process r
    enters before process 0 leaves, and the other way round, which bounds the difference of their
    clocks from both sides (Cristian 1989, "Probabilistic clock synchronization", with a meeting
    in place of a message). The narrowest bounds of all rounds are kept.

    Args:
        rounds: of each meeting, when each process entered and left it, by its own clock.
    """
    n = len(rounds[0][0])
    found = []
    for r in range(n):
        low = max(entered[r] - left[0] for entered, left in rounds)
        high = min(left[r] - entered[0] for entered, left in rounds)
        found.append(((low + high) / 2, (high - low) / 2))
    return found


def evaluate(found: Sequence[tuple[float, float]], host_names: Sequence[str]) -> Check:
    """Return the line of the report; `found` is what `offsets` returns."""
    ahead = [offset for offset, _ in found]
    slow, fast = ahead.index(min(ahead)), ahead.index(max(ahead))
    skew, error = ahead[fast] - ahead[slow], max(error for _, error in found)
    within = f"give or take {error:.3f} s"
    if skew > TOLERATED + error:
        return warn(
            "clocks",
            f"{host_names[fast]} is {skew:.3f} s ahead of {host_names[slow]}, {within}",
            "let the hosts follow a time server (chronyc tracking shows whether they do)",
        )
    return ok("clocks", f"{skew:.3f} s apart, {within}")
