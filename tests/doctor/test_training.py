"""Faults that the doctor reports in its ten training steps."""

import math

import pytest

from jaxgpt.doctor.training import N_STEPS, judge

LN_256 = math.log(256)
FALLING = [LN_256 - 0.1 * i for i in range(N_STEPS)]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([(FALLING[::-1], ["a"])] * 2, "from about 5.55"),
        ([([LN_256] * N_STEPS, ["a"])] * 2, "it should fall by more than 0.5"),
        ([([LN_256, math.nan], ["a"])] * 2, "to nan"),
        ([(FALLING, ["a"]), ([*FALLING[:-1], 4.9], ["a"])], "process 1 differs from process 0"),
        ([(FALLING, ["a"]), (FALLING, ["b"])], "in its losses or parameters"),
        ([(FALLING, ["a", "b"])], "different parameters"),
    ],
)
def test_wrong_training_results_fail(found, words):
    check = judge(found, 2)
    assert check.status == "FAIL"
    assert words in check.finding
    assert check.remedy
    assert judge([(FALLING, ["a"])] * 2, 2).status == "OK"
