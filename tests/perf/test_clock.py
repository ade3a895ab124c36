import time

import pytest

from jaxgpt.perf.clock import Clock


def test_every_moment_is_in_one_activity_even_if_the_system_time_is_set(monkeypatch):
    now, set_forward = [0.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1000 + now[0] + set_forward[0])
    clock = Clock(995.0)  # five seconds ago
    for activity, seconds in (("compile", 1), ("step", 2), ("data", 4), ("step", 8)):
        clock.enter(activity)
        now[0] += seconds
        set_forward[0] = 3600.0
        with clock.within("save"):
            now[0] += 16
    assert clock.seconds() == {"imports": 5, "compile": 1, "step": 10, "data": 4, "save": 64}
    assert clock.spent("step", "data", "state") == 14
    assert clock.elapsed() == 5 + 15 + 64


def test_the_clock_starts_with_the_process():
    clock = Clock()
    assert list(clock.seconds()) == ["imports"]
    assert clock.elapsed() == pytest.approx(time.time() - clock.began, abs=0.1)
    assert 0 < clock.elapsed() < 7 * 86_400
