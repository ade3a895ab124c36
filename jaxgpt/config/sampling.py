"""Sampling options: how to choose the next token."""

from dataclasses import dataclass
from numbers import Integral, Real

from jaxgpt.config.errors import UsageError

MAX_TEMPERATURE = 10**6  # the smallest temperature above 0 is 1 / MAX_TEMPERATURE


@dataclass(frozen=True)
class Sampling:
    """Options that turn logits into the distribution of the next token.

    The options are applied in the order of the fields, as in transformers. `top_p` and `min_p`
    apply only to tokens that the earlier options have kept. Tokens that tie with a kept token are
    also kept. If `temperature` is 0, the other options have no effect.
    """

    temperature: float = 0.0  # divisor of the logits; 0 always takes the most likely token
    top_k: int | None = None  # keep the `top_k` most likely tokens
    # Keep the smallest set of most likely tokens with a total probability of at least `top_p`
    # (nucleus sampling, arXiv 1904.09751).
    top_p: float | None = None
    # Keep tokens that are at least `min_p` times as likely as the most likely one (arXiv
    # 2407.01082).
    min_p: float | None = None

    def check(self, prefix: str = "") -> None:
        """Raise `UsageError` if a value is not a number or is out of range.

        `temperature` must be 0 or between 1e-6 and 1e6. `top_k` must be an integer, at least 1.
        `top_p` and `min_p` must be above 0 and at most 1. `top_k`, `top_p` and `min_p` may also be
        None.

        Args:
            prefix: prefix of option names in error messages, such as "--".
        """
        least, dash = 1 / MAX_TEMPERATURE, "-" if prefix else "_"
        for name, value in vars(self).items():
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number or value is None and name != "temperature"):
                key = f"{prefix}{name.replace('_', dash)}"
                raise UsageError(f"{key}={value!r}: must be a number")
        if self.temperature != 0 and not least <= self.temperature <= MAX_TEMPERATURE:
            raise UsageError(
                f"{prefix}temperature={self.temperature}: must be 0, or between {least} and "
                f"{MAX_TEMPERATURE}"
            )
        if self.top_k is not None and (self.top_k < 1 or not isinstance(self.top_k, Integral)):
            raise UsageError(
                f"{prefix}top{dash}k={self.top_k}: must be a whole number, at least 1; None allows "
                "all tokens"
            )
        for name, value in (("top", self.top_p), ("min", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise UsageError(
                    f"{prefix}{name}{dash}p={value}: must be more than 0 and at most 1"
                )
