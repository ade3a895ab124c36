"""What a measurement is doing, for who waits for it at a terminal."""

import sys

from jaxgpt.cluster.process_group import ProcessGroup


def tell(cluster: ProcessGroup, words: str) -> None:
    """Process 0 writes a line to standard error, if a person reads it."""
    if cluster.is_main and sys.stderr.isatty():
        print(f"... {words}", file=sys.stderr, flush=True)
