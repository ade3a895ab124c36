"""Between steps, a run does not recompile anything and does not stall the device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxgpt.cluster import shutdown as exits
from jaxgpt.runtime.dispatch import LIMIT
from jaxgpt.train import setup
from jaxgpt.train.reporting.metrics import MetricsBuffer
from jobs import SMALL, losses, train_here

COMPILED = "/jax/core/compile/backend_compile_duration"  # also of what comes from the cache
RUN = (*SMALL, "--mesh", "2,1,2", "train.log_interval=5")


@pytest.fixture
def compilations(monkeypatch):
    """(step -> programs compiled before its metrics were read, all compilation events)."""
    events, until = [], {}

    def listen(event, seconds, **_):
        if event == COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    read = MetricsBuffer.read

    def counted(self, step, *arguments, **options):
        until[step] = len(events)
        return read(self, step, *arguments, **options)

    monkeypatch.setattr(MetricsBuffer, "read", counted)
    yield until, events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.long  # in short, test_commands.py reads it in the log of a run
def test_nothing_is_compiled_after_the_first_evaluation(compilations, tmp_path):
    until, events = compilations
    arguments = ("train.eval_interval=4", "train.sample_tokens=5", "checkpoint.interval=4")
    assert train_here(*RUN, *arguments, "--out", tmp_path, "train.max_iters=12") == exits.DONE
    assert until[5] > until[4]  # the first evaluation and the first sample
    assert until[12] == until[5] == len(events)

    train_here("--out", tmp_path, "train.max_iters=20")  # from a checkpoint
    assert until[17] > until[16]
    assert until[20] == until[17] == len(events)


class OnDevice:
    """An array of a step that reports when it is waited for."""

    def __init__(self, array, waited):
        self._array, self._waited = array, waited

    def __array__(self, *arguments, **options):
        self._waited()
        return np.asarray(self._array, *arguments, **options)

    def block_until_ready(self):
        self._waited()
        return self

    def copy_to_host_async(self):  # which waits for nothing
        self._array.copy_to_host_async()


@pytest.mark.parametrize(
    ("max_iters", "expected"),
    [
        # The first step, every fifth, the last.
        pytest.param(13, {1, 5, 10, 13}, marks=pytest.mark.long),
        (23, {1, 5, 10, 15, 20, 23}),  # more steps than may be under way
    ],
)
def test_logging_waits_for_the_device_only_at_log_interval(
    max_iters, expected, monkeypatch, tmp_path
):
    begun, waited = [], set()

    def wait_for(step):
        if begun[-1] - step < LIMIT:  # an older one is done for long, unless devices lag behind
            waited.add(begun[-1])

    class Watched:
        """A train step whose metrics are `OnDevice`."""

        def __init__(self, step):
            self._step = step

        def lower(self, *arguments):
            return Watched(self._step.lower(*arguments))

        def compile(self):
            return Watched(self._step.compile())

        def __call__(self, state, step, *operands):
            begun.append(int(step))
            state, metrics = self._step(state, step, *operands)
            watched = functools.partial(wait_for, int(step))
            return state, jax.tree.map(lambda m: OnDevice(m, watched), metrics)

    make_steps = setup.make_steps

    def watched_steps(*arguments, **options):
        steps = make_steps(*arguments, **options)
        return dataclasses.replace(steps, train_step=Watched(steps.train_step))

    monkeypatch.setattr(setup, "make_steps", watched_steps)
    assert train_here(*RUN, "--out", tmp_path, f"train.max_iters={max_iters}") == exits.DONE
    assert begun == list(range(1, max_iters + 1))
    assert waited == expected
    assert sorted(losses(tmp_path)) == sorted(expected)


@pytest.mark.long
def test_traced_steps_are_listed_and_the_run_is_the_same(tmp_path):
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    skip = ("--train-range-to-skip", "5", "5")
    train_here(*RUN, "--out", plain, "train.max_iters=8", *skip)
    train_here(*RUN, "--out", traced, "train.max_iters=8", *skip, "--profile-steps", "4:6")
    assert losses(traced) == losses(plain)
    log = (traced / "train.log").read_text()
    assert f"traced steps 4 to 6 into {traced}/profile" in log
    assert "profile of 2 steps" in log and "; skipped steps among them: 1\n" in log
    assert "steps to trace: none" not in log
    assert "the 10 most expensive operations of a step" in log and " matmul " in log
    assert len(list(traced.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1

    assert train_here("--out", traced, "train.max_iters=10") == exits.DONE  # and nothing to trace
    log = (traced / "train.log").read_text()
    assert log.count("traced steps") == 1
    assert "steps to trace: none, because profile_steps=4:6 are past or skipped" in log


def test_a_run_that_stops_while_it_traces_tells_what_it_has(tmp_path):
    arguments = (*RUN, "--out", tmp_path, "train.max_iters=8", "--profile-steps", "2:6")
    assert train_here(*arguments, stop_at=3) == exits.STOPPED
    assert "traced steps 2 to 3" in (tmp_path / "train.log").read_text()
    assert train_here(*arguments) == exits.DONE  # the rest of them
    assert "traced steps 4 to 6" in (tmp_path / "train.log").read_text()
