"""Convert conversations to text with a Hugging Face chat template in a sandbox.

A template is a Jinja program that comes with a tokenizer, so it is untrusted code. Like
Hugging Face Transformers, jaxgpt renders it in an `ImmutableSandboxedEnvironment`. The template
cannot change its inputs and has no access to files or Python internals.
"""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError, in_words, read_json
from jaxgpt.data.tokenizers import special_token

TEMPLATE_FILE = "chat_template.jinja"
# In older versions, a template can escape the sandbox (CVE-2025-27516).
MIN_JINJA2_VERSION = (3, 1, 6)
# Unicode noncharacters that mark the start and end of {% generation %} blocks.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Range = tuple[int, int]  # (start, end) in characters; the end is exclusive


class Rendered(NamedTuple):
    """A conversation rendered as text."""

    text: str
    answers: list[Range]  # the parts of `text` that count toward the loss


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: dict[str, str], name: str):
        """Compile a template.

        Args:
            source: text of the template.
            special_tokens: the template's variables for special tokens, such as `bos_token`.
            name: file that contains the template, for error messages.

        Raises:
            UsageError: if `source` is not a valid template.
        """
        self._name, self._special_tokens = name, special_tokens
        self._marks_answers = re.search(r"{%[-+]?\s*generation\b", source) is not None
        try:
            self._template = _environment().from_string(source)
        except UsageError:
            raise
        except Exception as error:  # untrusted code can raise any exception
            raise UsageError(f"{name}: is not a valid chat template ({in_words(error)})") from None

    def render(self, messages: Sequence[dict[str, str]]) -> Rendered:
        """Render a list of messages, each with the strings `role` and `content`.

        The messages must not contain U+FDD0 or U+FDD1, which mark {% generation %} blocks.

        The answers are the contents of {% generation %} blocks. If the template has no such block,
        each answer is located by rendering the conversation up to the answer's start and up to its
        end.

        Raises:
            ValueError: if the template rejects the conversation, or if an answer cannot be located.
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
                    f"the chat template of {self._name} renders the first {number + 1} messages "
                    "differently if more messages follow; use lines with one answer each, or a "
                    "template with {% generation %} around answers"
                )
            # A model stops at the end-of-turn token, so whitespace after that token is not part of
            # the answer. If the template adds no such token, the whitespace itself ends the turn.
            end = after.rstrip()
            content = message["content"].rstrip()
            if content and end.endswith(content):
                end = after
            answers.append((len(before), max(len(before), len(end))))
        return Rendered(whole, answers)

    def _render(self, messages: Sequence[dict[str, str]], **variables: Any) -> str:
        variables = {"add_generation_prompt": False, "tools": None, "documents": None} | variables
        try:
            return self._template.render(messages=messages, **variables, **self._special_tokens)
        except Exception as error:  # untrusted code can raise any exception
            raise ValueError(
                f"the chat template of {self._name} rejects the conversation ({in_words(error)}); "
                "change the line or the template"
            ) from None


def template_files(tokenizer: str, given: Path | None) -> tuple[Path | None, Path | None]:
    """Return the paths of a tokenizer's tokenizer_config.json and chat template.

    `tokenizer` is a name, such as `char`, or the path of a file or folder. The template is `given`
    or, by default, chat_template.jinja in the tokenizer's folder. A default path is None if the
    file does not exist, or if `tokenizer` is a name. Raises `OSError` if a path cannot be accessed.
    """
    path = Path(tokenizer)
    if tokenizer in ("char", "byte") or not path.exists():
        return None, given
    folder = path if path.is_dir() else path.parent
    config, template = (
        found if found.is_file() else None
        for found in (folder / "tokenizer_config.json", folder / TEMPLATE_FILE)
    )
    return config, given or template


def find_template(tokenizer: str, given: Path | None) -> ChatTemplate | None:
    """Return the template in the file `given` or, by default, the tokenizer's own template.

    The tokenizer's own template is chat_template.jinja in the tokenizer's folder. If there is no
    such file, it is the `chat_template` field of tokenizer_config.json. If that field has several
    templates, the template named `default` is used. Returns None if no template is found.
    `tokenizer` is the path of a file or folder, or a name. Tokenizers given by name, such as
    `char`, have no template of their own. Raises `UsageError` if the template or
    tokenizer_config.json cannot be read or is invalid.
    """
    config_path, file = template_files(tokenizer, given)
    try:
        config = read_json(config_path, {}) if config_path else {}
        source, name = config.get("chat_template"), str(config_path)
        if isinstance(source, list):  # several named templates
            source = {t.get("name"): t.get("template") for t in source}.get("default")
        if file:
            source, name = file.read_text(), str(file)
        if source is not None and not isinstance(source, str):
            raise ValueError("chat_template is not a string")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"--tokenizer {tokenizer}: cannot read {file or TEMPLATE_FILE} or "
            f"tokenizer_config.json ({in_words(error)}); give another template with "
            "--chat-template FILE"
        ) from None
    # Settings such as add_bos_token are not tokens.
    names = [key for key in config if key.endswith("_token")]
    tokens = {name: text for name in names if (text := special_token(config[name])) is not None}
    return None if source is None else ChatTemplate(source, tokens, name)


def _unmarked(marked: str) -> Rendered:
    """Remove the markers of {% generation %} blocks, and return the text and its answers."""
    text, answers = "", []
    for part in marked.split(_BEGIN):
        answer, mark, rest = part.partition(_END)
        if mark:
            answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Rendered(text, answers)


def _environment():
    """Return a Jinja environment as in Hugging Face Transformers, but without `strftime_now`.

    Without `strftime_now`, templates use their default date, so the output does not depend on the
    current date. Raises `UsageError` if jinja2 is missing or too old.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise UsageError(
            "the `jinja2` package, which renders chat templates, is not installed; run "
            "pip install 'jaxgpt[hf]' or pip install jinja2"
        ) from None
    installed = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < MIN_JINJA2_VERSION:
        raise UsageError(
            f"jinja2 {installed}: a chat template can run arbitrary code (CVE-2025-27516); run pip "
            f"install 'jinja2>={'.'.join(map(str, MIN_JINJA2_VERSION))}'"
        )

    class Generation(jinja2.ext.Extension):
        """The {% generation %} block, which encloses an assistant message."""

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
