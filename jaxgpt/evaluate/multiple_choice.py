"""Multiple choice, scored as HellaSwag (arXiv 1905.07830): the likeliest choice is the answer."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.evaluate.encoder import Encoder
from jaxgpt.evaluate.likelihood import Pair, encode_pair, log_likelihoods
from jaxgpt.evaluate.model import Model

FIELDS = ("question", "choices", "answer")
HELLASWAG = ("ctx", "endings", "label")  # the same in HellaSwag's own files
# lm_eval's names: log-likelihoods are compared as they are, by character and by byte.
ACCURACIES = ("acc", "acc_norm", "acc_bytes")


@dataclass(frozen=True)
class Question:
    """A question with its choices."""

    pairs: tuple[Pair, ...]  # the tokens of the question and of each choice
    choices: tuple[str, ...]
    answer: int

    def is_right(self, log_likelihoods: Sequence[float]) -> dict[str, bool]:
        """Return whether the likeliest choice is the answer, by each of `ACCURACIES`."""
        characters = np.array([len(choice) for choice in self.choices])
        n_bytes = np.array([len(choice.encode()) for choice in self.choices])
        scores = np.array(log_likelihoods)
        divided = scores, scores / characters, scores / n_bytes
        return {
            name: int(np.argmax(values)) == self.answer
            for name, values in zip(ACCURACIES, divided, strict=True)
        }


def read_questions(path: Path, encoder: Encoder | None, block_size: int) -> list[Question]:
    """Return the questions of a file of JSON lines.

    A line has `question`, `choices` and `answer`, the number of the right choice from 0, or is one
    of HellaSwag's own. Raises `UsageError` with the number of a line that is not.
    """
    if encoder is None:
        raise UsageError(
            f"--multiple-choice={path}: the model's data had no meta.json with a tokenizer, which "
            "questions need"
        )
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may have U+2028 and others
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--multiple-choice={path}: cannot be read ({in_words(error)})") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_encode(encoder, *_parse(line), block_size))
            except ValueError as error:
                raise UsageError(f"{path}:{number}: {error}") from None
    if not found:
        raise UsageError(f"--multiple-choice={path}: is empty; give a question a line, in JSON")
    return found


def _parse(line: str) -> tuple[str, list[str], int]:
    """Return question, choices and answer; `ValueError` if the line has something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object with question, choices and answer")
    names = HELLASWAG if "endings" in fields else FIELDS
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"has no {missing[0]}; a line has {', '.join(names)}")
    question, choices, answer = (fields[name] for name in names)
    is_text = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not isinstance(question, str) or not is_text or len(choices) < 2:
        raise ValueError(f"{names[0]} must be a text, and {names[1]} two texts or more")
    if names == HELLASWAG:
        question, choices = _hellaswag(fields, question), [clean_hellaswag(c) for c in choices]
        if not all(choices):
            raise ValueError("endings has a text with nothing but marks of WikiHow, as [title]")
        answer = int(answer) if str(answer).isdecimal() else answer
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_number or not 0 <= answer < len(choices):
        raise ValueError(
            f"{names[2]} is {json.dumps(answer)}, and must be the number of a choice, "
            f"0 to {len(choices) - 1}"
        )
    "".join([question, *choices]).encode()  # `ValueError` for half a surrogate pair
    return question, choices, answer


def _hellaswag(fields: dict[str, Any], ctx: str) -> str:
    """Return the question of a line of HellaSwag's files, in the words of lm_eval's task."""
    if all(isinstance(fields.get(key), str) for key in ("activity_label", "ctx_a", "ctx_b")):
        ctx = f"{fields['ctx_a']} {fields['ctx_b'].capitalize()}"
        return clean_hellaswag(f"{fields['activity_label']}: {ctx}")
    return clean_hellaswag(ctx)


def clean_hellaswag(text: str) -> str:
    """Return a text without the marks of WikiHow, as lm_eval's task cleans it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _encode(
    encoder: Encoder, question: str, choices: list[str], answer: int, block_size: int
) -> Question:
    """Return a question in tokens; `ValueError` for what the model cannot read."""
    pairs = tuple(encode_pair(encoder, question, f" {choice}") for choice in choices)
    for choice, pair in zip(choices, pairs, strict=True):
        n = len(pair.continuation)
        if not 0 < n <= block_size:
            raise ValueError(
                f"the choice {choice[:40]!r} has {n} tokens; it must have 1 to "
                f"model.block_size={block_size}"
            )
    return Question(pairs, tuple(choices), answer)


def score_questions(model: Model, questions: Sequence[Question]) -> dict[str, float | None]:
    """Return the share of right answers by each of `ACCURACIES`, and its standard error.

    A single question has no standard error. All processes of the job take part.
    """
    scored = iter(log_likelihoods(model, [pair for q in questions for pair in q.pairs]))
    right = [q.is_right([next(scored).nats for _ in q.pairs]) for q in questions]
    n, out = len(questions), {}
    for name in ACCURACIES:
        share = sum(found[name] for found in right) / n
        out[name] = share
        out[f"{name}_stderr"] = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None
    return out
