"""Where a generated text ends, and how much of it is final while it is being generated."""

from collections.abc import Sequence
from typing import NamedTuple


class Written(NamedTuple):
    """A text that is being generated."""

    text: str  # the prompt and the new text, without an end that later tokens may change
    is_done: bool


def text_so_far(prompt: str, text: str, stop: Sequence[str], is_last: bool) -> Written:
    """Return the final part of a text.

    Args:
        prompt: the prompt, with which `text` begins.
        text: the text of all tokens so far.
        stop: strings that end the new text, which is then cut before the string. If several occur,
            the one whose last character comes first ends it.
        is_last: whether no more tokens follow.
    """
    new = text[len(prompt) :]
    matches = [(at + len(s), at) for s in stop if (at := new.find(s)) >= 0]
    if matches:
        return Written(prompt + new[: min(matches)[1]], True)
    if not is_last:
        new = new.rstrip("\ufffd")  # the first bytes of a character
        begun = (n for s in stop for n in range(1, len(s)) if new.endswith(s[:n]))
        new = new[: len(new) - max(begun, default=0)]
    return Written(prompt + new, is_last)
