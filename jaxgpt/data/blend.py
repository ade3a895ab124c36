"""A blend of sources: lines `WEIGHT PATH [CORPUS]`, and which source sample n comes from."""

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

MIN_BLOCK = 4096  # samples from one boundary to the next, about
MIN_SHARE = Fraction(1, 10**6)  # for which there are 2^21, made in seconds


@dataclass(frozen=True)
class BlendEntry:
    """A source as a configuration names it."""

    weight: Fraction
    weight_text: str  # as it was given
    path: Path
    corpus: str  # without a name the last part of the path, or all of it where others end alike
    key: str  # the setting that names it, for errors

    @property
    def directory(self) -> Path:
        """The folder that it is, or is in."""
        return self.path if self.path.is_dir() else self.path.parent


def read_file_list(path: Path) -> list[str]:
    """Return the lines of data.file_list that name a source; `UsageError` if there are none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"data.file_list={path}: cannot be read ({in_words(error)}); give a text file"
        ) from None
    lines = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError(f"data.file_list={path}: is empty; give a line `WEIGHT PATH` per source")
    return lines


def parse_lines(lines: Sequence[str], key: str) -> list[BlendEntry]:
    """Return the sources that a blend names; `UsageError` for a bad line or too small a weight."""
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
                f"{key}: {entry.path} has the weight {entry.weight_text}, less than a millionth "
                f"of corpus {entry.corpus} or that of the blend; leave it out or give it more"
            )
    return found


def _parse(line: str, key: str) -> tuple[str, Path, str | None]:
    """Return the weight, path and name of a line."""
    try:
        weight, path, *name = shlex.split(line)
        if Fraction(weight) <= 0 or len(name) > 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"{key}: the line {line!r} must be a weight above 0, a path (in quotes if it has "
            "spaces) and, if you like, the name of the corpus, such as "
            "`0.25 /data/wiki_text_document wiki`"
        ) from None
    return weight, Path(expand_user(path, f"{key}: ")), name[0] if name else None


def blend_shares(entries: Sequence[BlendEntry]) -> tuple[tuple[Fraction, str], ...]:
    """Return what decides the order of a blend's data beside its sources: shares and corpora."""
    whole = sum(entry.weight for entry in entries)
    return tuple((entry.weight / whole, entry.corpus) for entry in entries)


class WeightedInterleave:
    """Sample n -> (corpus, number of the sample within it): weights hold after every n.

    After any n samples corpus i, of share w_i, has given within 1 of n * w_i. That a sequence like
    this exists is known as chairman assignment (R. Tijdeman, "The chairman assignment problem",
    Discrete Math. 32, 1980), but it is made step by step. To reach sample n without those before
    it, it is cut at boundaries where the counts are chosen by themselves (`_counts_at`), such that
    both sides can keep within 1; between two boundaries every corpus's j-th sample has a first and
    a last place that keep it within 1, and the one that is due first is taken first. Boundaries lie
    so far apart that every corpus gives at least one sample between them, or counts could not grow.

    Everything is whole numbers: weights p_i of sum Q, shares p_i / Q. (Grain's mix, which is O(1)
    as well, strays by more than 1: by 1.3 for five corpora, by 4.4 for twenty.)
    """

    def __init__(self, weights: Sequence[Fraction]):
        """Take positive weights, of which none may be below MIN_SHARE of all."""
        share = min(weights) / sum(weights)
        assert share >= MIN_SHARE, weights
        self.block = max(MIN_BLOCK, 2 ** math.ceil(math.log2(2 / share)))
        whole = math.lcm(*(w.denominator for w in weights))
        self._weights = [int(w * whole) for w in weights]
        self._sum = sum(self._weights)
        self.make_block = functools.lru_cache(maxsize=3)(self._make_block)

    def __getitem__(self, n: int) -> tuple[int, int]:
        """Return the corpus of sample n (from 0), and how many samples that corpus gave before."""
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
        """Return the block's first sample, the counts before it, each sample's corpus and number.

        Numbers count a corpus's samples within the block, from 0.
        """
        first, before = self._boundary(number)
        end, after = self._boundary(number + 1)
        weights, total = self._weights, self._sum

        def released(corpus: int) -> tuple[int, int]:
            """Corpus i may give sample j + 1 as the n-th of all if j < n w_i."""
            return max(given[corpus] * total // weights[corpus] + 1, first + 1), corpus

        given = list(before)
        waiting = [released(i) for i in range(len(weights)) if given[i] < after[i]]
        heapq.heapify(waiting)
        due: list[tuple[int, int]] = []
        corpora, numbers = array("L"), array("L")
        for n in range(first + 1, end + 1):
            while waiting and waiting[0][0] <= n:
                corpus = heapq.heappop(waiting)[1]
                # It has to before n w_i exceeds j + 1, or its count would be more than 1 behind.
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
        """Return the first n from number * block on that can be a boundary, and the counts."""
        start = number * self.block
        for n in range(start, start + self.block // 2):
            counts = self._counts_at(n)
            if counts is not None:
                return n, counts
        raise AssertionError(f"no boundary after {start} for weights {self._weights}")

    def _counts_at(self, n: int) -> list[int] | None:
        """Return n w_i, rounded up for the largest remainders; None if that is no boundary.

        With d_i = n w_i - count_i, the next h samples have to serve floor(d_i + h w_i) times every
        corpus for which that is positive: those with the earliest deadlines b_i = (1 - d_i) / w_i,
        A = {b_i <= h}. They can, for all h, if the sums over A say d(A) - 1 < (1 - w(A)) b for the
        last deadline b in A. The samples before n are the same, backwards, with -d_i.
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
    """Sample n -> (corpus, source, number within it): corpora are mixed, and each one's sources."""

    def __init__(self, weights: Sequence[Fraction], corpora: Sequence[int]):
        """Take the weight of each source, and the corpus (0, 1, ...) that it belongs to."""
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
        """Return the corpus of sample n (from 0), its source, and its number in that source."""
        corpus, within = self._corpora[n]
        member, number = self._sources[corpus][within]
        return corpus, self._members[corpus][member], number

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n samples come from each corpus."""
        return self._corpora.counts(n)
