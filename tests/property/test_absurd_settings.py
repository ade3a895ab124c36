"""Any value of any setting is accepted, or rejected at once in one line, before JAX starts."""

import re

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from jaxgpt.config import Config, UsageError, mesh_shape, parse_args
from jaxgpt.config.parse import settings
from jaxgpt.perf.memory import require_memory
from jaxgpt.perf.units import GIB
from time_limit import time_limit

KEYS = list(settings())
NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "1000000", "1" + "0" * 18, "1" + "0" * 30, "9" * 5000, "-0.0",
    "2147483647", "2147483648", "4294967296", "18446744073709551616", "1e30", "1e308", "1e400",
    "-1e400", "1e-320", "inf", "-inf", "nan", "0x10", "1_000", "1.0", "1e3", "٣", "²",
)  # fmt: skip
WORDS = (
    "", " ", "None", "True", "off", "x", "a\nb", "\ud800", "\0", "~", "~nobody/x", "/", "/dev/null",
    "A:B", "1:1000000000000", "1,1,1", "1000000,1,1", "1,1,1000000", "1,2147483647,1", "-1,-1,1",
    "data=1,data=1", "1 2", "=", "--", "\U0001f642" * 99,
)  # fmt: skip
# What a device of a laptop has; a run asks its devices.
ROOM = 16 * GIB


def outcome(arguments):
    """Return the valid configuration, or the error message."""
    try:
        config = parse_args(arguments)
        shape = mesh_shape(config, mesh_shape(config).n_devices)
        require_memory(config, shape, ROOM, on_cpu=True)
    except UsageError as error:
        return str(error)
    return config


def check(key, words):
    with time_limit():
        found = outcome(["--config", "tiny", f"--{key}", *words])
    if isinstance(found, str):
        # `--` and `data=...` are arguments of their own, in addition to the missing value.
        assert "\n" not in found or words[0] == "--" or words[0].startswith("data=")
        assert "[Errno" not in found
    else:
        assert isinstance(found, Config)


@pytest.mark.parametrize("key", KEYS)
def test_absurd_values_end_in_a_sentence(key, request):
    long = request.config.getoption("--long")
    for word in (*NUMBERS, *WORDS) if long else ("-1", "0", "1" + "0" * 30, "1e400", "nan", "a\nb"):
        check(key, [word])


@pytest.mark.long
def test_absurd_values_of_several_settings_end_in_a_sentence():
    pairs = st.dictionaries(
        st.sampled_from([k for k in KEYS if k != "config"]),
        st.sampled_from((*NUMBERS, *WORDS)),
        min_size=2,
        max_size=5,
    )

    @run_settings(
        max_examples=2000, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(pairs)
    def run(words):
        with time_limit():
            found = outcome([f"{key}={word}" for key, word in words.items()])
        if isinstance(found, str) and "\n" in found:  # one line for each key
            count = int(found.partition(" problems\n")[0])
            assert sum(line.startswith("  ") for line in found.splitlines()) in (count, count + 1)
            assert count <= len(words)

    run()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["model.block_size=100000", "model.attention=xla"], "model.block_size=100000"),
        (["model.n_embd=1000000"], "model.n_embd=1000000"),
        (["model.n_layer=5000"], "model.n_layer=5000: .*parallel.scan_layers=True"),
        (["--config", "gpt-175b"], "model.n_layer=96"),
        (["--config", "gpt2", "train.batch_size=480", "--mesh", "1,480,1"], "train.batch_size=480"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_allocated(arguments, key):
    found = outcome(["model.vocab_size=50257", *arguments])
    assert isinstance(found, str) and re.search(key, found), found


@pytest.mark.parametrize("preset", ["tiny", "shakespeare_char_cpu", "gpt2"])
def test_presets_of_a_machine_fit_it(preset):
    assert isinstance(outcome(["--config", preset]), Config)
