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
def test_bytes_are_read_in_their_unit(n, text):
    assert format_bytes(n) == text


def test_a_noun_has_its_plural():
    assert (count(1, "host"), count(2, "process", "es")) == ("1 host", "2 processes")
