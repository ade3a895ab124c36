"""`OPTIMIZERS` is the only list of optimizer names."""

import re

import pytest

from jaxgpt.config import OptimizerConfig, UsageError, parse_args
from jaxgpt.optim import CHOICES, OPTIMIZERS
from jaxgpt.optim.state import n_moments
from jaxgpt.train.__main__ import main


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("adamw", "momentum=0.9"),
        ("lion", "adamw_learning_rate=1e-3"),
        ("sgd", "beta2=0.95"),
        ("adafactor", "beta1=0.9"),
        ("adafactor", "momentum=0.9"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_use_is_refused(name, unused):
    with pytest.raises(UsageError) as error:
        parse_args([f"optimizer.name={name}", f"optimizer.{unused}"], choices=CHOICES)
    assert str(error.value) == (
        f"optimizer.{unused}: has no effect with optimizer.name={name}; leave it out"
    )


def test_a_preset_s_setting_that_the_optimizer_does_not_use_is_ignored():
    parse_args(["--config", "gpt2", "optimizer.name=sgd", "optimizer.momentum=0"], choices=CHOICES)


def test_an_unknown_optimizer_is_one_sentence_before_anything_starts(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["optimizer.name=adamv", "--out", str(tmp_path / "run")])
    assert end.value.code == 2 and not (tmp_path / "run").exists()
    assert "optimizer.name=adamv: must be one of adamw, lion, muon" in capsys.readouterr().err


def test_help_lists_the_optimizers(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    (line,) = re.findall(r"--optimizer.name: (.*)", capsys.readouterr().out)
    assert line == f"one of {', '.join(OPTIMIZERS)} (default: adamw)"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "adamw"}, (2, 2)),  # first and second moment
        ({"name": "lion"}, (1, 1)),
        ({"name": "muon"}, (1, 2)),  # embeddings use AdamW
        ({"name": "adafactor"}, (0, 0)),  # rows and columns of the second moment
        ({"name": "sgd"}, (1, 1)),
        ({"name": "sgd", "momentum": 0.0}, (0, 0)),
    ],
)
def test_moments_of_a_matrix_and_of_an_embedding(settings, expected):
    config = OptimizerConfig(**settings)
    assert (n_moments(config), n_moments(config, for_embedding=True)) == expected
