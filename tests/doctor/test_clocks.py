import random

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.clocks import clock_check, evaluate, offsets

AHEAD = (0.0, 3.0, -0.5)  # seconds, of the clocks of three processes


def meetings(n):
    """Processes that come and go at random, but leave only when all have come."""
    rng = random.Random(1)
    now = 1e9
    for _ in range(n):
        come = [now + rng.uniform(0, 0.3) for _ in AHEAD]
        go = [max(come) + rng.uniform(0, 0.3) for _ in AHEAD]
        now = max(go)
        yield (
            [t + ahead for t, ahead in zip(come, AHEAD, strict=True)],
            [t + ahead for t, ahead in zip(go, AHEAD, strict=True)],
        )


def test_offsets_are_found_within_the_stated_error():
    rounds = list(meetings(20))
    for (offset, error), truth in zip(offsets(rounds), AHEAD, strict=True):
        assert 0 <= error < 0.3
        assert abs(offset - truth) <= error
    few, many = offsets(rounds[:2])[1][1], offsets(rounds)[1][1]
    assert many < few


def test_clocks_that_are_apart_are_named():
    names = ("node0", "node1", "node2")
    check = evaluate(offsets(list(meetings(20))), names)
    assert check.status == "WARN"
    assert check.finding.startswith("node1 is 3.") and "ahead of node2" in check.finding
    assert evaluate([(0.0, 0.0), (0.9, 0.01), (0.1, 0.01)], names).status == "OK"
    assert evaluate([(0.0, 0.0), (1.5, 0.7), (0.1, 0.01)], names).status == "OK"  # who knows


def test_one_host_has_one_clock():
    assert clock_check(ProcessGroup("test")).status == "OK"
