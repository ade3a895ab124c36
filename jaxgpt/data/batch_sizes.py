"""The batch size of each step of a run, and the sequences that each step consumes."""

from collections.abc import Iterable, Sequence


class BatchSizes:
    """A batch size that may change when a run resumes.

    Sequences are numbered from 0. Step s consumes sequences `consumed(s - 1)` to `consumed(s) - 1`.
    Changing the batch size therefore neither repeats nor skips a sequence.

    >>> sizes = BatchSizes([(1, 16)]).change_after(20, 32)
    >>> sizes.changes, sizes.at(21), sizes.consumed(21)
    (((1, 16), (21, 32)), 32, 352)
    """

    def __init__(self, changes: Iterable[Sequence[int]]):
        """Initialize from (first step, batch size) pairs, sorted by step.

        If there are no pairs, only `change_after` may be called.
        """
        self.changes = tuple((first, size) for first, size in changes)

    def at(self, step: int) -> int:
        """Return the batch size of a step, which must not precede the first step in `changes`."""
        return next(size for first, size in reversed(self.changes) if first <= step)

    def consumed(self, step: int) -> int:
        """Return the number of sequences consumed by all steps up to and including `step`."""
        ends = [first for first, _ in self.changes[1:]] + [step + 1]
        return sum(
            size * max(0, min(end, step + 1) - first)
            for (first, size), end in zip(self.changes, ends, strict=True)
        )

    def step_of(self, sequence: int) -> int:
        """Return the step that consumes a sequence."""
        first, size = next(
            change for change in reversed(self.changes) if self.consumed(change[0] - 1) <= sequence
        )
        return first + (sequence - self.consumed(first - 1)) // size

    def change_after(self, step: int, size: int) -> "BatchSizes":
        """Return a copy that uses batch size `size` for all steps after `step`."""
        kept = [change for change in self.changes if change[0] <= step]
        return BatchSizes(kept if kept and kept[-1][1] == size else [*kept, (step + 1, size)])
