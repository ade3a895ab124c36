"""Processes of a job that are reported as stragglers."""

import json

from jaxgpt.perf.flops import HostTimes
from jaxgpt.train.reporting.stragglers import INTERVALS, Stragglers, straggler_line

STEP = 0.1  # seconds


def named(own, n_intervals=2 * INTERVALS):
    """Return the reported stragglers; `own(rank, interval)` is their own seconds per step."""
    slow, out, totals = Stragglers([f"host{rank}" for rank in range(4)]), [], [0.0] * 4
    for number in range(n_intervals + 1):
        totals = [total + 10 * own(rank, number) for rank, total in enumerate(totals)]
        times = [HostTimes(10 * number, 10 * STEP * number, total, 0.0) for total in totals]
        words = {rank: json.dumps(one) for rank, one in enumerate(times)}
        assert slow.compare(number, {**words, 3: None}) == []  # the last one has said nothing yet
        out += slow.compare(number, words)
        assert slow.compare(number, words) == []  # nothing new
    return [(record.rank, record.host, record.step) for record in out]


def test_one_that_is_slow_in_three_intervals_in_a_row_is_named_once():
    assert named(lambda rank, _: 0.05 if rank == 2 else 0.01) == [(2, "host2", INTERVALS)]
    # A median of 40 ms times 1.3 is 52 ms, and a tenth of a step more than the median 50 ms.
    assert named(lambda rank, _: 0.053 if rank == 0 else 0.04) == [(0, "host0", INTERVALS)]


def test_others_are_not():
    assert named(lambda rank, _: 0.051 if rank == 0 else 0.04) == []  # not 1.3 times the median
    assert named(lambda rank, _: 0.009 if rank == 0 else 0.001) == []  # 8 % of a step: no matter
    assert named(lambda rank, number: 0.05 if rank == number % 4 else 0.01, 40) == []  # by turns
    often = lambda rank, number: 0.05 if rank == 1 and number % INTERVALS else 0.01  # noqa: E731
    assert named(often, 40) == []  # never three in a row
    assert named(lambda *_: 0.09) == []  # all of them


def test_a_clock_that_begins_anew_starts_a_new_interval():
    slow = Stragglers(["here", "there"])
    for steps in (10, 20, 3, 9):
        words = [json.dumps(HostTimes(steps, STEP * steps, 0.01 * steps, 0.0)) for _ in range(2)]
        slow.compare(steps, dict(enumerate(words)))
        assert all(0 <= own < STEP for own in slow.own)


def test_the_line_says_who_and_how_much():
    record = {"rank": 3, "host": "n7", "step": 40, "own": 0.1, "data": 0.06, "median": 0.01,
              "seconds": 0.2}  # fmt: skip
    for words in ("process 3 on host n7", "step 40", "own time is 100.0 ms", "60.0 ms of waiting"):
        assert words in straggler_line(record)
