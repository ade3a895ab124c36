"""Log lines at the start and at the end of a run."""

import dataclasses
import re
import shutil

from jaxgpt.cluster import shutdown as exits
from jaxgpt.config import config_from_file
from jaxgpt.train.reporting.reporter import _LINES
from jobs import SMALL, records, train_here

ONE = ("--mesh", "1,1,1")


def test_the_weight_decay_line_leaves_out_padding_of_the_vocabulary(tmp_path):
    """300 rows are stored as 384, a multiple of 128."""
    train_here(*SMALL, *ONE, "model.vocab_size=300", "train.max_iters=1", "--out", tmp_path)
    log = (tmp_path / "train.log").read_text()
    D, T, V = 64, 64, 300
    decayed = 12 * D * D + (V + T) * D  # GPT-2: matrices of a layer, two embeddings
    assert f"applied to {decayed:,} parameters in 6 arrays, not to {3 * D:,} in 3 arrays" in log
    assert f"model: {(decayed - T * D + 3 * D) / 1e6:.2f}M parameters" in log


def test_the_settings_are_in_lines_that_fit_on_a_screen(tmp_path):
    train_here(*SMALL, *ONE, "train.max_iters=1", "--out", tmp_path)
    lines = [line[20:] for line in (tmp_path / "train.log").read_text().splitlines()]
    shown = [line for line in lines if re.match(r"(settings|model|train): \w+=", line)]
    assert len(shown) > 2 and max(map(len, shown)) < 120
    config = dataclasses.asdict(config_from_file(tmp_path / "config.yaml"))
    config["settings"] = {k: v for k, v in config.items() if not isinstance(v, dict)}
    for section in "settings", "model", "train":
        text = " ".join(line.partition(": ")[2] for line in shown if line.startswith(section))
        assert text == " ".join(f"{key}={value!r}" for key, value in config[section].items())


def test_the_last_line_has_the_losses_of_the_last_step_or_none(tmp_path):
    settings = ("train.max_iters=6", "train.eval_interval=4", "checkpoint.interval=2")
    assert train_here(*SMALL, *ONE, *settings, "--out", tmp_path, stop_at=5) == exits.STOPPED
    log = (tmp_path / "train.log").read_text()
    (stopped,) = (line for line in log.splitlines() if "stopped by" in line)
    assert "after step 5, which is saved" in stopped and "loss=" not in stopped
    assert [r["step"] for r in records(tmp_path, "eval")] == [4]

    assert train_here("--out", tmp_path) == exits.DONE  # the last step is always evaluated
    found = records(tmp_path, "eval")[-1]
    losses = f"train_loss={found['train_loss']:.4f} val_loss={found['val_loss']:.4f}"
    assert found["step"] == 6
    assert f"done after step 6: {losses}\n" in (tmp_path / "train.log").read_text()


def test_a_run_that_lost_its_checkpoints_says_that_it_starts_again(tmp_path):
    train_here(*SMALL, *ONE, "train.max_iters=2", "--out", tmp_path)
    said = f"no checkpoint in {tmp_path}: the run starts again at step 1\n"
    assert said not in (tmp_path / "train.log").read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    train_here("--out", tmp_path)
    assert said in (tmp_path / "train.log").read_text()


def test_bytes_that_are_not_text_are_explained():
    text = {"kind": "sample", "step": 5, "text": "caf\ufffd"}
    assert _LINES["sample"](text) == (
        "sample at step 5 (\ufffd: bytes that are not valid UTF-8):\ncaf\ufffd\n"
    )
    assert _LINES["sample"](text | {"text": "café"}) == "sample at step 5:\ncafé\n"
