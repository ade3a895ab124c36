"""Stop strings: where a generated text ends, and which part of it can no longer change."""

from collections.abc import Sequence
from typing import NamedTuple


class Written(NamedTuple):
    """A text during its generation."""

    text: str  # the prompt and the new text, except for an end that later tokens may change
    is_done: bool


def text_so_far(prompt: str, text: str, stop: Sequence[str], is_last: bool) -> Written:
    """Return the part of a text that later tokens cannot change, and whether the text is complete.

    Args:
        prompt: the prompt; `text` begins with it.
        text: the text of all tokens so far.
        stop: strings that end the new text; the text is cut before the string. If several occur,
            the one that is completed first counts.
        is_last: True if no more tokens follow.
    """
    new = text[len(prompt) :]
    matches = [(at + len(s), at) for s in stop if (at := new.find(s)) >= 0]
    if matches:
        return Written(prompt + new[: min(matches)[1]], True)
    if not is_last:
        new = new.rstrip("\ufffd")  # bytes of an incomplete character
        begun = (n for s in stop for n in range(1, len(s)) if new.endswith(s[:n]))
        new = new[: len(new) - max(begun, default=0)]
    return Written(prompt + new, is_last)
