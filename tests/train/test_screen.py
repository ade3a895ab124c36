"""What a run shows on a terminal of 80 columns and 24 rows, and what it writes to train.log."""

import re

import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.train.reporting.reporter import chosen_metrics
from jobs import SMALL, command, records, train_here
from terminal import run_in_terminal

ARGUMENTS = (
    *SMALL, "--mesh", "1,1,1", "train.max_iters=12", "train.log_interval=3",
    "train.eval_interval=6", "train.sample_tokens=60", "train.log_columns=tokens",
    "--train-range-to-skip", "7", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The screens of a run and of its continuation, and the run directory."""
    out = tmp_path_factory.mktemp("screen") / "run"
    first = run_in_terminal(command("train", *ARGUMENTS, "--out", out), 80, 24)
    again = run_in_terminal(command("train", "--out", out, "train.max_iters=15"), 80, 24)
    return first, again, out


def shown(text):
    """The lines that are left on the screen: what is printed after a line's last return."""
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]


def test_the_first_loss_is_on_the_first_screen_and_nothing_wraps(runs):
    first, again, out = runs
    for text in (first, again):
        lines = shown(text)
        (row, *_) = (i for i, line in enumerate(lines) if re.match(r"step=\d+/\d+ loss=", line))
        assert row < 24 - 1  # the last row is the progress bar
        longest = max((line for line in lines if str(out) not in line), key=len)
        assert len(longest) <= 80, longest
        (compiling,) = (i for i, line in enumerate(lines) if line.startswith("compiling"))
        assert compiling < row


def test_the_bar_shows_the_step_and_the_time_of_the_line_beside_it(runs):
    for text in runs[:2]:
        beside = re.findall(
            r"step=(\d+)/\d+ (?:loss|skipped)(.*)\n\r *\d+%\|[^|]*\| step (\d+)/\d+ \[([^]]*)\]",
            text,
        )
        assert len(beside) == len(re.findall(r"step=\d+/\d+ (?:loss|skipped)", text)) >= 2
        for step, line, step_of_bar, times in beside:
            assert step == step_of_bar
            if left := re.search(r"left=[\d:]+", line):
                assert times.endswith(left[0])


def test_there_are_no_control_characters(runs):
    first, again, out = runs
    assert set(re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", first + again)) <= {"\r"}  # the bar
    for name in ("train.log", "samples.txt"):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", (out / name).read_text()), name


def test_the_log_has_all_settings_and_the_screen_does_not(runs):
    first, _, out = runs
    log = (out / "train.log").read_text()
    for key in ("n_layer=1", "beta2=0.99", ": rank 0 on cpu", "collectives: ", "log_columns=("):
        assert key in log and key not in first


def test_the_legend_is_shown_once(runs):
    first, again, out = runs
    meaning = "global norm of the unclipped gradient"
    assert first.count(meaning) == (out / "train.log").read_text().count(meaning) == 1
    assert meaning not in again


def test_lines_show_consumed_tokens_skips_and_the_last_evaluation(runs):
    first, _, out = runs
    lines = [line for line in shown(first) if re.match(r"step=\d+/\d+ ", line)]
    steps = [int(line.partition("/")[0].removeprefix("step=")) for line in lines]
    assert steps == [1, 3, 6, 7, 8, 9, 12]
    for step, line in zip(steps, lines, strict=True):
        assert f" tokens={step * 16 * 64:,}" in line
    skipped = [line for line in lines if " skipped range=7-8 " in line]
    assert [re.search(r"skipped=(\d)", line)[1] for line in skipped] == ["1", "2"]
    assert all(" dt=" in line for line in skipped)
    (evaluated,) = (r for r in records(out, "eval") if r["step"] == 6)
    log = (out / "train.log").read_text()
    line = next(line for line in log.splitlines() if " step=9/12 " in line)
    assert f"train_loss={evaluated['train_loss']:.4f} val_loss={evaluated['val_loss']:.4f}" in line
    assert "val_loss=" not in next(line for line in log.splitlines() if " step=6/12 loss" in line)


def test_verbose_prints_what_the_log_has(tmp_path, capsys):
    train_here(
        *SMALL, "--mesh", "2,1,1", "--out", tmp_path, "train.max_iters=1", "train.verbose=True"
    )
    printed = capsys.readouterr().out
    log = [line[20:] for line in (tmp_path / "train.log").read_text().splitlines()]
    header = log[: log.index("compiling the training step ...")]
    assert "beta2=0.99" in printed and printed.startswith("\n".join(header) + "\n")


def test_a_column_that_needs_several_processes_is_left_out():
    config = load_config("tiny", "train.log_columns=slow")
    assert "slowest_over_mean" not in chosen_metrics(config, n_processes=1)
    assert chosen_metrics(config, n_processes=2)["slowest_over_mean"].rank == -1


def test_an_unknown_column_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="train.log_columns=speed: unknown column.*tokens"):
        train_here(*SMALL, "--mesh", "1,1,1", "--out", tmp_path, "train.log_columns=speed")
