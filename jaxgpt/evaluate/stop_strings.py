"""Stop strings: where to end generated text, and which part of it is final."""

from collections.abc import Sequence
from typing import NamedTuple


class Written(NamedTuple):
    """Text that is being generated."""

    text: str  # the prompt, and the new text that later tokens will not change
    is_done: bool


def text_so_far(prompt: str, text: str, stop: Sequence[str], is_last: bool) -> Written:
    """Return the text that later tokens will not change, and whether it is complete.

    If `is_last` is not set and there is no stop string, the text is incomplete. In this case,
    trailing U+FFFD characters, which stand for bytes of an incomplete character, are left out, and
    so is a suffix that may be the beginning of a stop string.

    Args:
        prompt: the prompt.
        text: the text so far, which begins with the prompt.
        stop: non-empty stop strings. The new text ends before the stop string that is completed
            first.
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
