"""The memory in use, and the lower bound on a step's memory."""

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgpt.config import MeshShape, load_config
from jaxgpt.perf.memory import peak_rss, score_bytes


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_is_in_bytes_on_both_systems(monkeypatch, platform, unit):
    def read_text(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7))
    assert peak_rss() == 7 * unit


def test_the_peak_does_not_include_the_parent_process():
    """Python and JAX take less than 512 MiB, which this process holds meanwhile."""
    held = b"x" * 2**29
    program = "from jaxgpt.perf.memory import peak_rss; print(peak_rss())"
    text = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    assert 2**25 < int(text) < len(held)


def test_a_pipeline_stores_the_scores_of_one_group_of_layers():
    words = ("model.n_layer=8", "model.attention=xla", "parallel.mesh=data=1,stage=2")
    words += ("train.gradient_accumulation_steps=2", "parallel.schedule=circular")
    shape = MeshShape(stage=2)
    once, twice = (
        score_bytes(load_config("tiny", *words, f"parallel.stage_repeats={n}"), shape, on_cpu=False)
        for n in (1, 2)
    )
    assert once == 2 * twice > 0


def test_a_ring_stores_no_scores():
    words = ("model.dropout=0", "parallel.mesh=context=2")
    shape = MeshShape(context=2)
    ring, ulysses = (
        score_bytes(load_config("tiny", *words, f"parallel.context_impl={impl}"), shape, True)
        for impl in ("ring", "ulysses")
    )
    assert ring == 0 < ulysses
