"""Types of numbers with bounds."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Bounds(NamedTuple):
    """A bound on a number: its description, and a test of it."""

    text: str
    hold: Callable[[Any], bool]


# JAX counts steps, seeds and places in arrays in 32 bits.
Count = Annotated[int, Bounds("at least 1 and less than 2^31", lambda n: 1 <= n < 2**31)]
CountOrZero = Annotated[int, Bounds("at least 0 and less than 2^31", lambda n: 0 <= n < 2**31)]
# float32, of which sums and squares are made, ends at 3e38.
NonNegative = Annotated[float, Bounds("at least 0 and at most 1e18", lambda x: 0 <= x <= 1e18)]
Positive = Annotated[float, Bounds("more than 0, at most 1e18", lambda x: 0 < x <= 1e18)]
AtLeastOne = Annotated[float, Bounds("1 to 1e18", lambda x: 1 <= x <= 1e18)]
Rate = Annotated[float, Bounds("at least 0 and less than 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Bounds("more than 0 and less than 1", lambda x: 0 < x < 1)]
Minutes = Annotated[float, Bounds("more than 0, at most 1000000 minutes", lambda x: 0 < x <= 10**6)]
VocabSize = Annotated[int, Bounds("at least 2 and less than 2^31", lambda n: 2 <= n < 2**31)]
Window = Annotated[int, Bounds("at least 4 and at most 100000 steps", lambda n: 4 <= n <= 10**5)]
LogInterval = Annotated[int, Bounds("1 to 100000 steps", lambda n: 1 <= n <= 10**5)]
SampleSize = Annotated[int, Bounds("0 to 1000000 tokens", lambda n: 0 <= n <= 10**6)]
MAX_INIT_TIMEOUT = 86_400  # seconds: a day
InitTimeout = Annotated[float, Bounds("1 to 86400 seconds", lambda x: 1 <= x <= MAX_INIT_TIMEOUT)]
