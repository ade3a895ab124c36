"""Conversations to text: a chat template of Hugging Face's, rendered in a sandbox.

A template is a Jinja program that comes with a tokenizer, so it is foreign code. It is rendered by
`ImmutableSandboxedEnvironment`, as transformers does: it sees strings and lists, changes nothing,
and reaches neither files nor Python.
"""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError, in_words, read_json

FILE = "chat_template.jinja"
OLDEST = (3, 1, 6)  # templates can leave the sandbox of older versions of jinja2 (CVE-2025-27516)
# Noncharacters of Unicode around what a template marks by {% generation %}.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Range = tuple[int, int]  # the first character, and the one after the last


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[Range]  # what the assistant says, with what ends its turn


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str], name: str):
        """Compile a template.

        Args:
            special_tokens: variables of the template, such as `bos_token`.
            name: where the template comes from, for errors.
        """
        self._name, self._special_tokens = name, special_tokens
        self._marks_answers = re.search(r"{%-?\s*generation\b", source) is not None
        try:
            self._template = _environment().from_string(source)
        except UsageError:
            raise
        except Exception as error:  # a foreign program: jinja2 raises nothing narrower
            raise UsageError(f"{name}: is no chat template ({in_words(error)})") from None

    def render(self, messages: Sequence[dict[str, str]]) -> Rendered:
        """Return a conversation as text; `ValueError` if the template refuses it.

        Answers are what the template marks by {% generation %}. If it marks none, they are found
        by rendering the conversation up to before and after each of them.
        """
        whole = self._render(messages)
        if self._marks_answers:
            return _unmarked(whole)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            after = self._render(messages[: number + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template of {self._name} renders the messages up to number "
                    f"{number + 1} in another way by themselves than as a part of the whole; give "
                    "lines with one answer each, or a template with {% generation %} around answers"
                )
            # A model stops at the token that ends its turn: space after it is not its own.
            end = after.rstrip()
            content = message["content"].rstrip()
            if content and end.endswith(content):
                end = after
            answers.append((len(before), len(end)))
        return Rendered(whole, answers)

    def _render(self, messages: Sequence[dict[str, str]], **variables: Any) -> str:
        variables = {"add_generation_prompt": False, "tools": None, "documents": None} | variables
        try:
            return self._template.render(messages=messages, **variables, **self._special_tokens)
        except Exception as error:  # a foreign program: it can raise anything
            raise ValueError(
                f"the chat template of {self._name} refuses it: {in_words(error)}"
            ) from None


def find_template(tokenizer: str, given: Path | None) -> ChatTemplate | None:
    """Return the template of a tokenizer, or the one in a file that is `given`; None without any.

    That is chat_template.jinja beside tokenizer.json, or `chat_template` of tokenizer_config.json.
    """
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    has_files = tokenizer not in ("char", "byte")
    config_path, file = folder / "tokenizer_config.json", given or folder / FILE
    try:
        config = read_json(config_path, {}) if has_files and config_path.is_file() else {}
        source, name = config.get("chat_template"), str(config_path)
        if isinstance(source, list):  # several templates by name
            source = {t.get("name"): t.get("template") for t in source}.get("default")
        if given or (has_files and file.is_file()):
            source, name = file.read_text(), str(file)
        if source is not None and not isinstance(source, str):
            raise ValueError("chat_template is no text")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"--tokenizer {tokenizer}: its chat template, or {given or file}, cannot be read "
            f"({in_words(error)})"
        ) from None
    tokens = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    tokens = {key: value for key, value in tokens.items() if isinstance(value, str)}
    return None if source is None else ChatTemplate(source, tokens, name)


def _content(token: Any) -> Any:
    """Return a special token's text, which may be stored with options."""
    return token.get("content") if isinstance(token, dict) else token


def _unmarked(marked: str) -> Rendered:
    """Return a text without the marks of {% generation %}, and what was between them."""
    text, answers = "", []
    for part in marked.split(_BEGIN):
        answer, mark, rest = part.partition(_END)
        if mark:
            answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Rendered(text, answers)


def _environment():
    """Return a Jinja environment like that of transformers, but without the date.

    Prepared data depends on its input alone; templates that ask for `strftime_now` have a default.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise UsageError(
            "the package that renders chat templates is not installed: pip install 'jaxgpt[hf]', "
            "or pip install jinja2"
        ) from None
    installed = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        raise UsageError(
            f"jinja2 {installed} can run code that is in a chat template (CVE-2025-27516): pip "
            f"install 'jinja2>={'.'.join(map(str, OLDEST))}'"
        )

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}, around what the assistant says."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = self.call_method("mark")
            return jinja2.nodes.CallBlock(mark, [], [], body).set_lineno(line)

        def mark(self, caller):
            return _BEGIN + caller() + _END

    def raise_exception(message):
        raise ValueError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    out = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    out.filters["tojson"] = tojson
    out.globals["raise_exception"] = raise_exception
    return out
