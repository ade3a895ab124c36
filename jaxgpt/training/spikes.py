"""Steps that are skipped by hand: their batches are consumed unread and nothing is updated."""

from collections.abc import Iterable


class SkipRanges:
    """A set of steps, given as ranges with both ends included.

    >>> 20 in SkipRanges([(10, 20), (25, 30)])
    True
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]):
        """Overlapping and adjoining ranges are merged."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.ranges = tuple(merged)

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def flat(self) -> tuple[int, ...]:
        """The numbers as `--train-range-to-skip` takes them."""
        return tuple(step for pair in self.ranges for step in pair)

    def __str__(self) -> str:
        return ", ".join(f"{first}-{last}" for first, last in self.ranges) or "none"
