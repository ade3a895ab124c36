"""The messages for mistakes in the command lines of all commands except train."""

import pytest

from jaxgpt.bench.__main__ import parser as bench_parser
from jaxgpt.config import UsageError
from jaxgpt.evaluate.__main__ import parser as evaluate_parser
from jaxgpt.plan.__main__ import parser as plan_parser
from jaxgpt.prepare import parser as prepare_parser
from jaxgpt.report.__main__ import parser as report_parser


@pytest.mark.parametrize(
    ("parser", "line", "message"),
    [
        (report_parser, "page runs/a --outt f", "unknown argument --outt; did you mean --out?"),
        (prepare_parser, "text --input a --val_shar=0", "did you mean --val-share?"),
        (prepare_parser, "text corpus", "corpus: use --input corpus"),
        (evaluate_parser, "--run a --strid 4", "did you mean --stride?"),
        (plan_parser, "--advice 64", "did you mean --advise?"),  # --device is as near
        (bench_parser, "step --round 3", "did you mean --rounds?"),
    ],
)
def test_an_unknown_option_gets_the_nearest_one(parser, line, message):
    with pytest.raises(UsageError) as caught:
        parser().parse_known_args(line.split())
        parser().parse_args(line.split())
    assert str(caught.value).endswith(message) and "\n" not in str(caught.value)


def test_settings_are_not_options():
    words = ["--model.n-layer", "2", "train.seed=3"]
    assert plan_parser().parse_known_args(["--advise", "8", *words])[1] == words


def test_a_missing_option_shows_the_usage():
    with pytest.raises(UsageError) as caught:
        prepare_parser().parse_args(["text", "--name", "mine"])
    message, _, usage = str(caught.value).partition("; see --help; usage: ")
    assert message.endswith("required: --input")
    assert usage.startswith("python -m jaxgpt.prepare text ") and "--input" in usage


@pytest.mark.parametrize("words", [["--run", "runs/my run"], ["--run=runs/my run"]])
def test_a_run_given_as_an_option_gets_the_line_to_type(words):
    with pytest.raises(UsageError) as caught:
        report_parser().parse_args(["page", *words, "--text"])
    line = str(caught.value).partition("use ")[2]
    assert line.startswith("python -m jaxgpt.report page ") and line.endswith(" --text")
    assert "--run" not in line and "'runs/my run'" in line
