"""Reports about each corpus of a run on several corpora."""

import numpy as np
import pytest

from jaxgpt.data.prepare.own_text import prepare_text
from jobs import SMALL, records, train_here


def test_losses_and_tokens_of_each_corpus(tmp_path):
    texts = {"easy": b"ab" * 20_000, "hard": np.random.default_rng(0).bytes(40_000)}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(bytes(byte & 127 for byte in text))
        prepare_text(tmp_path / name, [tmp_path / f"{name}.txt"], "byte")
    blend = [f"{weight} {tmp_path / name} {name}" for weight, name in ((1, "easy"), (3, "hard"))]
    train_here(
        *(a for a in SMALL if not a.startswith("data.")), "--data.blend", *blend,
        "model.n_layer=1", "optimizer.warmup_iters=2", "optimizer.learning_rate=0.01",
        "train.max_iters=20",
        "train.log_interval=5", "--out", tmp_path / "run", "--mesh", "1,1,1",
    )  # fmt: skip
    lines = records(tmp_path / "run")
    assert [r["step"] for r in lines] == [1, 5, 10, 15, 20]
    for line in lines:
        tokens = {name: found["tokens"] for name, found in line["corpora"].items()}
        assert sum(tokens.values()) == line["consumed_tokens"]
        assert tokens["easy"] == pytest.approx(line["consumed_tokens"] / 4, abs=64)
    (evaluated,) = records(tmp_path / "run", "eval")
    for found in (lines[-1]["corpora"], evaluated["corpora"]):
        key = "val_loss" if found is evaluated["corpora"] else "loss"
        assert found["easy"][key] < np.log(128) - 1 < np.log(128) - 0.2 < found["hard"][key]
    # The only line that is about a single step.
    easy, hard = (lines[0]["corpora"][name] for name in ("easy", "hard"))
    mean = (easy["loss"] * easy["tokens"] + hard["loss"] * hard["tokens"]) / (16 * 64)
    assert mean == pytest.approx(lines[0]["loss"], rel=1e-6)
