"""Blends of sources: parse lines of `WEIGHT PATH [CORPUS]`, and choose the source of sample n."""

import functools
import heapq
import math
import shlex
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from jaxgpt.config import UsageError, expand_user, in_words
from jaxgpt.data.megatron import prefix_of

MIN_BLOCK = 4096  # approximate minimum block size in samples
# Even for a share this small, a block has only 2^21 samples, and takes seconds to compute.
MIN_SHARE = Fraction(1, 10**6)


@dataclass(frozen=True)
class BlendEntry:
    """One source in the configuration of a run."""

    weight: Fraction
    weight_text: str  # as given by the user, or "1" without a blend
    path: Path
    # Default: name of the folder or file (in a blend, without .bin or .idx), or the path if the
    # name is ambiguous.
    corpus: str
    key: str  # the setting that selects the source, for error messages

    @property
    def directory(self) -> Path:
        """The source's folder, or the folder that contains its file."""
        return self.path if self.path.is_dir() else self.path.parent


def read_file_list(path: Path) -> list[str]:
    """Read the file that data.file_list names, and return its lines without surrounding whitespace.

    Blank lines and lines that begin with # are left out.

    Raises:
        UsageError: if the file cannot be read or lists no sources.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"data.file_list={path}: cannot be read ({in_words(error)}); give a file of "
            "`WEIGHT PATH` lines"
        ) from None
    lines = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError(
            f"data.file_list={path}: is empty; write one `WEIGHT PATH` line per source"
        )
    return lines


def parse_lines(lines: Sequence[str], key: str) -> list[BlendEntry]:
    """Parse the lines of a blend, one source per line.

    `key` is the setting that contains the lines, for error messages.

    Raises:
        UsageError: if a line is invalid, if a source has less than a millionth of its corpus's
            weight, or if a corpus has less than a millionth of the total weight.
    """
    parsed = [_parse(line, key) for line in lines]
    paths: dict[str, set[Path]] = defaultdict(set)
    for _, path, corpus in parsed:
        paths[corpus or prefix_of(path).name].add(path)
    found = []
    corpora: dict[str, Fraction] = defaultdict(Fraction)
    for weight, path, corpus in parsed:
        name = prefix_of(path).name
        corpus = corpus or (name if len(paths[name]) == 1 else str(path))
        corpora[corpus] += Fraction(weight)
        found.append(BlendEntry(Fraction(weight), weight, path, corpus, key))
    whole = sum(corpora.values())
    for entry in found:
        corpus = corpora[entry.corpus]
        if min(corpus / whole, entry.weight / corpus) < MIN_SHARE:
            raise UsageError(
                f"{key}: {entry.path} has weight {entry.weight_text}, which is less than "
                f"a millionth of corpus {entry.corpus}, or that corpus is less than a millionth of "
                "the blend; remove the line or increase the weight"
            )
    return found


def _parse(line: str, key: str) -> tuple[str, Path, str | None]:
    """Parse a line into its weight, path and corpus name (or None)."""
    try:
        weight, path, *name = shlex.split(line)
        if Fraction(weight) <= 0 or len(name) > 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"{key}: the line {line!r} must be a weight above 0, a path (in quotes if it has "
            "spaces) and, optionally, the name of a corpus, such as "
            "`0.25 /data/wiki_text_document wiki`"
        ) from None
    return weight, Path(expand_user(path, f"{key}: ")), name[0] if name else None


def blend_shares(entries: Sequence[BlendEntry]) -> tuple[tuple[Fraction, str], ...]:
    """Return (share of all samples, corpus) for each source.

    These pairs determine the source of every sample.
    """
    whole = sum(entry.weight for entry in entries)
    return tuple((entry.weight / whole, entry.corpus) for entry in entries)


def consumed_by_corpus(entries: Sequence[BlendEntry], n: int) -> dict[str, int]:
    """Return how many of the first n sequences of a run come from each corpus, by name."""
    names = list(dict.fromkeys(entry.corpus for entry in entries))
    blend = Blend([e.weight for e in entries], [names.index(e.corpus) for e in entries])
    return dict(zip(names, blend.counts(n), strict=True))


class WeightedInterleave:
    """Mapping from sample n to (corpus, index of the sample within that corpus).

    After any n samples, the number of samples from corpus i is within 1 of n * w_i, where w_i is
    its share. This is the chairman assignment problem (R. Tijdeman, Discrete Math. 32, 1980). Its
    solutions are usually built one sample at a time. Here, the sequence is divided into blocks, so
    that sample n can be found without computing all earlier samples. Block boundaries are chosen so
    that the blocks on both sides can satisfy the bound, and `_counts_at` computes the counts there
    directly. Inside a block, the bound gives each sample a range of positions, and samples are
    scheduled earliest deadline first. A block is long enough to contain a sample from every corpus.
    In a shorter block, rounding could make a count decrease.

    The arithmetic is exact: the weights are integers p_i, their sum is Q, and the shares are
    p_i / Q. (Grain's mix is also O(1), but its counts can deviate by more than 1. With Grain 0.2.18
    and five corpora with the weights 130, 233, 380, 385 and 986, the deviation is up to 2.6.)
    """

    def __init__(self, weights: Sequence[Fraction]):
        """Initialize from positive weights, each at least MIN_SHARE of their sum."""
        share = min(weights) / sum(weights)
        assert share >= MIN_SHARE, weights
        self.block = max(MIN_BLOCK, 2 ** math.ceil(math.log2(2 / share)))
        whole = math.lcm(*(w.denominator for w in weights))
        self._weights = [int(w * whole) for w in weights]
        self._sum = sum(self._weights)
        self.make_block = functools.lru_cache(maxsize=3)(self._make_block)

    def __getitem__(self, n: int) -> tuple[int, int]:
        """Return (corpus of sample n, number of earlier samples from this corpus), for n >= 0."""
        if len(self._weights) == 1:
            return 0, n
        first, before, corpora, numbers = self._block_of(n)
        corpus = corpora[n - first]
        return corpus, before[corpus] + numbers[n - first]

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n samples come from each corpus."""
        if len(self._weights) == 1:
            return [n]
        first, before, corpora, _ = self._block_of(n)
        given = Counter(corpora[: n - first])
        return [count + given[corpus] for corpus, count in enumerate(before)]

    def _block_of(self, n: int) -> tuple[int, list[int], array, array]:
        block = self.make_block(n // self.block)
        return block if block[0] <= n else self.make_block(n // self.block - 1)

    def _make_block(self, number: int) -> tuple[int, list[int], array, array]:
        """Build a block: (first sample, counts before the block, corpora, sample numbers).

        A sample's number is how many earlier samples in the block come from the same corpus.
        """
        first, before = self._boundary(number)
        end, after = self._boundary(number + 1)
        weights, total = self._weights, self._sum

        def released(corpus: int) -> tuple[int, int]:
            """Return (earliest position of the next sample, corpus). Positions start at 1."""
            return max(given[corpus] * total // weights[corpus] + 1, first + 1), corpus

        given = list(before)
        waiting = [released(i) for i in range(len(weights)) if given[i] < after[i]]
        heapq.heapify(waiting)
        due: list[tuple[int, int]] = []
        corpora, numbers = array("L"), array("L")
        for n in range(first + 1, end + 1):
            while waiting and waiting[0][0] <= n:
                corpus = heapq.heappop(waiting)[1]
                # If n w_i exceeds count_i + 1, corpus i is behind by more than one sample.
                deadline = (given[corpus] + 1) * total // weights[corpus] + 1
                heapq.heappush(due, (min(deadline, end), corpus))
            deadline, corpus = heapq.heappop(due)
            assert deadline >= n, (deadline, n)
            corpora.append(corpus)
            numbers.append(given[corpus] - before[corpus])
            given[corpus] += 1
            if given[corpus] < after[corpus]:
                heapq.heappush(waiting, released(corpus))
        assert given == after, number
        return first, before, corpora, numbers

    def _boundary(self, number: int) -> tuple[int, list[int]]:
        """Return the first valid boundary at or after number * block, and the counts there."""
        start = number * self.block
        for n in range(start, start + self.block // 2):
            counts = self._counts_at(n)
            if counts is not None:
                return n, counts
        raise AssertionError(f"no boundary after {start} for weights {self._weights}")

    def _counts_at(self, n: int) -> list[int] | None:
        """Return the counts after n samples, or None if n cannot be a boundary.

        The counts are n w_i, rounded up for the largest remainders and down for the others. Let
        d_i = n w_i - count_i. The next h samples must include at least floor(d_i + h w_i) from
        corpus i. This number is positive for the corpora A = {i: b_i <= h}, where b_i = (1 - d_i) /
        w_i is the deadline of corpus i. For every h, their samples fit if the sums over A satisfy
        d(A) - 1 < (1 - w(A)) b, where b is the last deadline in A. The samples before n must
        satisfy the same condition in reverse order, with -d_i.
        """
        weights, total = self._weights, self._sum
        counts = [n * weight // total for weight in weights]
        behind = [n * weight % total for weight in weights]  # d_i Q
        by_remainder = sorted(range(len(weights)), key=lambda i: (-behind[i], i))
        for i in by_remainder[: n - sum(counts)]:
            counts[i] += 1
            behind[i] -= total
        for sign in (1, -1):
            deadlines = [
                (Fraction(total - sign * d, weight), sign * d, weight)
                for d, weight in zip(behind, weights, strict=True)
            ]
            d_sum = weight_sum = 0
            for deadline, d, weight in sorted(deadlines):
                d_sum += d
                weight_sum += weight
                if d_sum - total >= (total - weight_sum) * deadline:
                    return None
        return counts


class Blend:
    """Mapping from sample n to (corpus, source, index of the sample within that source).

    Corpora, and the sources within each corpus, are interleaved by weight.
    """

    def __init__(self, weights: Sequence[Fraction], corpora: Sequence[int]):
        """Initialize from the weight of each source and the index of its corpus.

        Every corpus index from 0 to the largest must occur. Each source needs at least MIN_SHARE of
        its corpus's weight, and each corpus at least MIN_SHARE of the total weight.
        """
        self._members = [
            [source for source, c in enumerate(corpora) if c == corpus]
            for corpus in range(max(corpora) + 1)
        ]
        self._corpora = WeightedInterleave(
            [sum((weights[s] for s in members), Fraction(0)) for members in self._members]
        )
        self._sources = [
            WeightedInterleave([weights[s] for s in members]) for members in self._members
        ]

    def __getitem__(self, n: int) -> tuple[int, int, int]:
        """Return (corpus, source, index within the source) of sample n, all counted from 0."""
        corpus, within = self._corpora[n]
        member, number = self._sources[corpus][within]
        return corpus, self._members[corpus][member], number

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n samples come from each corpus."""
        return self._corpora.counts(n)
