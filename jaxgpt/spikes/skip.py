"""Skipped steps, which do not read their batch and do not update the state."""

from collections.abc import Iterable


class SkipRanges:
    """A set of steps, given as inclusive ranges.

    >>> 20 in SkipRanges([(10, 20), (25, 30)])
    True
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]):
        """Merge overlapping and adjacent ranges of (first, last) steps."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.ranges = tuple(merged)

    def __contains__(self, step: int) -> bool:
        return self.around(step) is not None

    def around(self, step: int) -> tuple[int, int] | None:
        """Return the range that contains a step, or None."""
        return next((pair for pair in self.ranges if pair[0] <= step <= pair[1]), None)

    def flat(self) -> tuple[int, ...]:
        """Return the ranges in the format of train_range_to_skip: first, last, first, last, ..."""
        return tuple(step for pair in self.ranges for step in pair)

    def __str__(self) -> str:
        return ", ".join(f"{first}-{last}" for first, last in self.ranges) or "none"


def remaining_ranges(
    ranges: Iterable[tuple[int, int]], skipped: SkipRanges, step: int
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the parts of `ranges` after `step`, and warnings about steps that were not skipped.

    A range causes a warning if any of its steps up to `step` is not in `skipped`.

    Args:
        ranges: the ranges to skip, as inclusive (first, last) pairs.
        skipped: the steps that the run has skipped up to `step`.
        step: the step of the checkpoint that the run continues from.
    """
    found, warnings = [], []
    for first, last in sorted(set(ranges)):
        before = min(last, step)
        if first <= step and not any(a <= first and before <= b for a, b in skipped.ranges):
            warnings.append(
                f"warning: train_range_to_skip={first} {last}: steps of this range were trained "
                f"before the checkpoint of step {step}; only later steps can still be skipped"
            )
        if last > step:
            found.append((max(first, step + 1), last))
    return found, warnings
