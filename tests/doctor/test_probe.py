"""The probe of a host's devices."""

import jax
import pytest

from jaxgpt.config import UsageError
from jaxgpt.doctor.probe import check_devices


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AssertionError(), "no such devices"), (RuntimeError("lost\nstack"), "lost")],
)
def test_devices_that_do_not_start_are_reported(monkeypatch, error, reason):
    def fail():
        raise error

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(UsageError, match=f"do not respond: {reason}$"):
        check_devices()
