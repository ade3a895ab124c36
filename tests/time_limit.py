"""A time limit for code that might hang."""

import contextlib
import signal

LIMIT = 60  # seconds


@contextlib.contextmanager
def time_limit():
    """Raise `TimeoutError` if the `with` block takes more than `LIMIT` seconds."""

    def stop(*_):
        raise TimeoutError(f"no end within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
