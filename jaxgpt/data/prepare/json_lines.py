"""Documents from JSON lines or Parquet rows.

A line or row holds plain text, a prompt and its completion, or a conversation.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError, in_words, shorten
from jaxgpt.data.prepare.chat_template import ChatTemplate, Range, find_template

KINDS = ("text",), ("messages",), ("prompt", "completion")  # the keys of each kind of line
ROLES = ("system", "user", "assistant", "tool")


class LineFormat(NamedTuple):
    """The user's settings for reading JSON lines and Parquet rows."""

    key: str | None  # KEY or PROMPT,COMPLETION; if None, the first line selects one of `KINDS`
    tokenizer: str  # as given by the user
    chat_template: Path | None  # if None, use the tokenizer's own template


class LineDocument(NamedTuple):
    """The text of a line, and the parts of it that count toward the loss."""

    text: str
    answers: Sequence[Range] | None = None  # one or more parts that count; None if all text counts
    has_special: bool = False  # whether to encode names of special tokens as special tokens

    @property
    def ends_with_answer(self) -> bool:
        """True if an end-of-text token after this document counts toward the loss."""
        return self.answers is None or self.answers[-1][1] >= len(self.text.rstrip())


class LineReader:
    """Reader for the lines or rows of a file. All lines or rows must be of the same kind."""

    def __init__(self, format_: LineFormat):
        self._format = format_
        self._keys = tuple(format_.key.split(",", 1)) if format_.key else None
        self._has_messages: bool | None = None  # set by the first line
        self._template: ChatTemplate | None = None

    @property
    def possible_keys(self) -> tuple[str, ...]:
        """The keys that may hold the text."""
        return self._keys or tuple(key for keys in KINDS for key in keys)

    def read(self, line: bytes, where: str) -> LineDocument:
        """Parse a line and return its document. `where` is the line's location, for error messages.

        Raises `UsageError` if the line is not a valid document, if it differs in kind from the
        previous lines, or if the first line matches several kinds.
        """
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            shown = shorten(line.decode(errors="replace"))
            raise self._invalid(
                where, f"not {shown!r} ({in_words(error)}); correct or remove the line"
            ) from None
        return self.read_value(value, where)

    def read_value(self, value: Any, where: str) -> LineDocument:
        """Convert a parsed line or row to a document.

        Raises `UsageError` in the same cases as `read`.
        """
        try:
            fields = self._fields(value, where)
            if self._has_messages:
                return self._conversation(fields[0], where)
            for text in fields:
                text.encode()  # JSON allows a lone surrogate, but UTF-8 does not
        except UsageError:
            raise
        except KeyError:
            keys = ", ".join(map(repr, value))
            raise self._invalid(
                where, f"but its keys are {keys or 'missing'}; choose keys with --jsonl-key"
            ) from None
        except (ValueError, TypeError, AttributeError):
            shown = shorten(json.dumps(value, default=str, ensure_ascii=False))
            raise self._invalid(
                where, f"not {shown}; correct the line, or choose keys with --jsonl-key"
            ) from None
        if len(fields) == 1:
            return LineDocument(*fields)
        prompt, completion = fields
        return LineDocument(prompt + completion, [(len(prompt), len(prompt) + len(completion))])

    def _invalid(self, where: str, what: str) -> UsageError:
        keys = " and ".join(map(repr, self._keys or KINDS[0]))
        return UsageError(f"{where} must be a JSON object with UTF-8 text under {keys}, {what}")

    def _fields(self, value: Any, where: str) -> list[Any]:
        """Return the values of the keys that hold the text.

        If the user has not set the keys, the first line selects them. Raises `TypeError`,
        `KeyError` or `UsageError` if the line is invalid.
        """
        if not isinstance(value, dict):
            raise TypeError
        if self._keys is None:
            found = [keys for keys in KINDS if all(key in value for key in keys)]
            if len(found) > 1:
                options = " or ".join(f"--jsonl-key {','.join(keys)}" for keys in found)
                raise UsageError(f"{where}: matches several kinds of lines; give {options}")
            self._keys = found[0] if found else None
        fields = [value[key] for key in self._keys or KINDS[0]]
        has_messages = len(fields) == 1 and isinstance(fields[0], list)
        if self._has_messages is None:
            self._has_messages = has_messages
            if has_messages:
                self._template = self._find_template(where)
            elif self._format.chat_template:
                raise UsageError(
                    f"--chat-template {self._format.chat_template}: is only for lines with "
                    f"messages, but {where.removeprefix('--input ')} has no messages; leave it out"
                )
        if self._has_messages != has_messages:
            raise UsageError(
                f"{where}: is of a different kind from the previous lines; prepare text and "
                "messages separately and mix them with data.blend"
            )
        return fields

    def _find_template(self, where: str) -> ChatTemplate:
        tokenizer = self._format.tokenizer
        found = find_template(tokenizer, self._format.chat_template)
        if found is None:
            raise UsageError(
                f"{where}: has messages, but the tokenizer {tokenizer} has no chat template "
                "(chat_template.jinja, or chat_template in tokenizer_config.json); give another "
                "tokenizer folder (prepare: --tokenizer, or the template with --chat-template; "
                "evaluate: data.tokenizer), or use lines with prompt and completion"
            )
        return found

    def _conversation(self, messages: list[Any], where: str) -> LineDocument:
        try:
            _check_messages(messages)
            text, answers = self._template.render(messages)
            text.encode()
            if not answers:
                raise ValueError(
                    "has no answer that counts toward the loss; remove the line or give another "
                    "chat template"
                )
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        return LineDocument(text, answers, True)


def _check_messages(messages: list[Any]) -> None:
    """Raise `ValueError` if a message is invalid or no message is from the assistant."""
    for number, message in enumerate(messages, 1):
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or "role" not in message:
            raise ValueError(
                f"message {number} must have a `role` and a string `content`, not "
                f"{json.dumps(message)[:80]}"
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {number} has the role {message['role']!r}, but it must be one of "
                f"{', '.join(ROLES)}"
            )
        # `ChatTemplate` uses these characters to mark answers.
        if any(mark in message["content"] for mark in "\ufdd0\ufdd1"):
            raise ValueError(
                f"message {number} contains U+FDD0 or U+FDD1, which are not valid in text; remove "
                "these characters"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(
            "has no assistant message, so nothing counts toward the loss; remove the line"
        )
