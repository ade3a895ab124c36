"""What counts as wrong in the doctor's ten training steps."""

import math

import pytest

from jaxgpt.doctor.training import N_STEPS, training_check

LN_256 = math.log(256)
FALLING = [LN_256 - 0.1 * i for i in range(N_STEPS)]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([(FALLING[::-1], "a")] * 2, "a new model's should be about 5.55"),
        ([([LN_256] * N_STEPS, "a")] * 2, "it should fall"),
        ([([LN_256, math.nan], "a")] * 2, "not a number"),
        ([(FALLING, "a"), ([*FALLING[:-1], 4.9], "a")], "on process 1 to 4.900"),
        ([(FALLING, "a"), (FALLING, "b")], "different parameters"),
        ([(FALLING, "a b")], "different parameters"),
    ],
)
def test_training_that_is_wrong_fails(found, words):
    check = training_check(found, 2)
    assert check.status == "FAIL"
    assert words in check.finding
    assert check.remedy
    assert training_check([(FALLING, "a")] * 2, 2).status == "OK"
