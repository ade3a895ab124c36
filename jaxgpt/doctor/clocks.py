"""How far the clocks of the hosts are apart: logs, checkpoints and file times are compared."""

import time
from collections.abc import Callable, Sequence

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.checks import Check

ROUNDS = 10
MUCH = 1.0  # seconds


def clock_check(cluster: ProcessGroup, clock: Callable[[], float] = time.time) -> Check:
    """Measures and judges the clocks of all processes."""
    if len(set(cluster.hosts)) == 1:
        return Check("clocks", "OK", "one host, one clock")
    rounds = []
    for _ in range(ROUNDS):
        entered = cluster.allgather(clock())
        rounds.append((entered, cluster.allgather(clock())))
    return judge(offsets(rounds), cluster.host_names)


Times = Sequence[float]


def offsets(rounds: Sequence[tuple[Times, Times]]) -> list[tuple[float, float]]:
    """How far each process's clock is ahead of process 0's, and how wrong that can be, in seconds.

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


def judge(found: Sequence[tuple[float, float]], host_names: Sequence[str]) -> Check:
    """The line of the report; `found` is what `offsets` returns."""
    ahead = [offset for offset, _ in found]
    slow, fast = ahead.index(min(ahead)), ahead.index(max(ahead))
    skew = ahead[fast] - ahead[slow]
    uncertain = max(error for _, error in found)
    finding = f"{skew:.3f} s apart, give or take {uncertain:.3f} s"
    if skew > MUCH + uncertain:
        return Check(
            "clocks",
            "WARN",
            f"{host_names[fast]} is {finding.replace('apart', f'ahead of {host_names[slow]}')}",
            "have the hosts follow a time server (chronyc tracking shows whether they do)",
        )
    return Check("clocks", "OK", finding)
