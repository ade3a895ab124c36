import random

import pytest

from jaxgpt.data.batch_sizes import BatchSizes


def test_steps_consume_what_their_batches_hold():
    drawn = random.Random(1)
    sizes, per_step = BatchSizes([(1, 5)]), [5] * 60
    for _ in range(200):  # changes before earlier ones too, as after a rewind
        step, size = drawn.randrange(60), drawn.randrange(1, 5)
        sizes = sizes.change_after(step, size)
        per_step[step:] = [size] * (60 - step)
        assert [sizes.at(step) for step in range(1, 61)] == per_step
        assert [sizes.consumed(step) for step in range(61)] == [
            sum(per_step[:n]) for n in range(61)
        ]
        steps = [step for step, size in enumerate(per_step, 1) for _ in range(size)]
        assert [sizes.step_of(sequence) for sequence in range(len(steps))] == steps
        assert BatchSizes(sizes.changes).changes == sizes.changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(0, 16)], ((1, 16),)),
        ([(0, 16), (20, 16)], ((1, 16),)),
        ([(0, 16), (20, 32), (20, 16)], ((1, 16),)),
        ([(0, 16), (20, 32), (30, 16)], ((1, 16), (21, 32), (31, 16))),
        ([(0, 16), (20, 32), (15, 32)], ((1, 16), (16, 32))),
        ([(0, 16), (0, 32)], ((1, 32),)),
    ],
)
def test_only_changes_are_kept(changes, expected):
    sizes = BatchSizes(())
    for step, size in changes:
        sizes = sizes.change_after(step, size)
    assert sizes.changes == expected
