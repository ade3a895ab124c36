import os

import pytest

from jaxgpt.config import UsageError
from jaxgpt.runtime.xla_flags import add_xla_flags


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", "--a=1 --b=2"),
        ("  ", "--a=1 --b=2"),
        (" --b=3 --c", "--a=1 --b=2 --b=3 --c"),
        ("--c --b=2", "--a=1 --c --b=2"),
    ],
)
def test_missing_flags_are_put_before_the_users(given, found, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    add_xla_flags("--a=1", "--b=2")
    assert os.environ["XLA_FLAGS"] == found
    add_xla_flags("--a=1", "--b=2")  # as in a notebook, by a second run
    assert os.environ["XLA_FLAGS"] == found


def test_a_file_of_flags_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "/flags.txt")
    with pytest.raises(UsageError, match="XLA_FLAGS=/flags.txt: is the name of a file"):
        add_xla_flags("--a=1")
