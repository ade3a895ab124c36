"""The Tab key completes commands, keys, values and presets in bash."""

import subprocess

import pytest

from jaxgpt.config.completion import bash_script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["jaxgpt", "tr"], ["train"]),
        (["python", "-m", "jaxgpt.tr"], ["jaxgpt.train"]),
        (["python", "-m", "jaxgpt.train", "model.n_la"], ["model.n_layer="]),
        (["jaxgpt", "train", "parallel.remat", "="], ["none", "full", "dots", "attention"]),
        (["jaxgpt", "plan", "parallel.remat", "=", "f"], ["full"]),
        (["jaxgpt", "train", "--model.bias", "T"], ["True"]),
        (["jaxgpt", "train", "parallel.scan_layers", "="], ["True", "False", "None"]),
        (
            ["python3", "-m", "jaxgpt.train", "--config", "shake"],
            ["shakespeare_char", "shakespeare_char_cpu"],
        ),
        (["python", "other.py", "model."], []),
    ],
)
def test_words_are_completed(words, expected):
    call = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jaxgpt; printf "%s\\n" "${COMPREPLY[@]}"'
    script = f"{bash_script(['train', 'plan'])}\n{call}"
    job = subprocess.run(["bash", "-c", script, "_", *words], capture_output=True, text=True)
    assert job.stdout.split() == expected, job.stderr
