import pytest

from jaxgpt.perf.units import count, format_bytes


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (2**26, "64 MiB"),
        (33.9 * 2**30, "33.9 GiB"),
        (2**40, "1,024 GiB"),
    ],
)
def test_bytes_are_formatted_with_binary_units(n, text):
    assert format_bytes(n) == text


def test_counts_use_the_plural_unless_they_are_one():
    assert (count(1, "host"), count(2, "process", "es")) == ("1 host", "2 processes")
