"""A run with a damaged checkpoint continues from the checkpoint before it."""

import os
import shutil

import pytest

from jaxgpt.cluster import shutdown as exits
from jaxgpt.config import UsageError
from jobs import SMALL, losses, records, run, train_here

SETTINGS = (*SMALL, "train.max_iters=24", "checkpoint.interval=10", "checkpoint.keep=9")


def flip(file):
    data = bytearray(file.read_bytes() or b"\0")
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


# Files that a restore needs; Orbax can restore without some of the others.
NEEDED = ("meta/metadata", "state/manifest.ocdbt", "state/d/")
DAMAGES = {"flip": flip, "truncate": truncate, "delete": os.remove}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 24 steps with checkpoints of steps 10, 20 and 24."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert train_here(*SETTINGS, "--mesh", "2,1,2", "--out", out) == exits.DONE
    return out


def copied(whole, out):
    """Copy the run without its last checkpoint; return the files of the checkpoint of step 20."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "24")
    return out, sorted(path for path in (out / "checkpoints/20").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "damage", [pytest.param(d, marks=() if d == "flip" else pytest.mark.long) for d in DAMAGES]
)
def test_whichever_file_is_damaged_the_run_ends_as_if_it_were_not(whole, tmp_path, damage, request):
    _, files = copied(whole, tmp_path / "count")
    for number in range(0, len(files), 1 if request.config.getoption("--long") else 6):
        out, files = copied(whole, tmp_path / str(number))
        DAMAGES[damage](files[number])
        assert train_here("--out", out) == exits.DONE, files[number]
        assert losses(out) == losses(whole), files[number]
        log = (out / "train.log").read_text()
        if (found := records(out, "damage")) == []:  # of a file that does not matter
            name = str(files[number].relative_to(out / "checkpoints" / "20"))
            assert "resumed from step 20" in log and not name.startswith(NEEDED)
            continue
        (record,) = found
        assert record["step"] == 10 and "checkpoints/20" in record["reason"]
        assert record["path"] == str(out / "checkpoints" / "20.damaged")
        assert os.path.isdir(record["path"]) and (out / "checkpoints" / "20" / "meta").is_dir()
        assert f"renamed to {record['path']}; the run continues from step 10" in log
        assert "resumed from step 10" in log


def test_a_range_to_skip_counts_from_the_checkpoint_gone_back_to(whole, tmp_path):
    out, _ = copied(whole, tmp_path / "run")
    for part in (out / "checkpoints/20/state/d").iterdir():
        truncate(part)
    ranges = ("--train-range-to-skip", "12", "14", "22", "22")
    assert train_here("--out", out, *ranges) == exits.DONE
    assert [step for step, loss in losses(out).items() if loss is None] == [12, 13, 14, 22]


def test_the_last_checkpoint_is_not_quarantined(whole, tmp_path):
    out, files = copied(whole, tmp_path / "run")
    for file in files:
        truncate(file)
    shutil.rmtree(out / "checkpoints" / "10")
    with pytest.raises(UsageError, match=r"checkpoints/20.* is damaged .*; remove"):
        train_here("--out", out)
    assert (out / "checkpoints" / "20").is_dir()


def test_damaged_weights_to_start_from_stay_where_they_are(whole, tmp_path):
    out, _ = copied(whole, tmp_path / "run")
    for part in (out / "checkpoints/20/state/d").iterdir():
        truncate(part)
    with pytest.raises(UsageError, match=r"checkpoints/20: cannot be restored .*another step"):
        train_here(*SETTINGS, "--out", tmp_path / "new", f"train.init_from={out}")
    assert (out / "checkpoints" / "20").is_dir()


@pytest.mark.long
def test_all_processes_go_back_together(tmp_path):
    """Only one of four processes has damaged files; the others do not wait for it forever."""
    arguments = (*SETTINGS, "--mesh", "1,4,1", "--out", tmp_path)
    assert run("train", *arguments, processes=4).returncode == exits.DONE
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "24")
    for part in (tmp_path / "checkpoints/20/state/ocdbt.process_2/d").iterdir():
        truncate(part)
    job = run("train", "--out", tmp_path, processes=4)
    assert job.returncode == exits.DONE, job.stdout
    assert "checkpoints/20.damaged; the run continues from step 10" in job.stdout
    assert losses(tmp_path) == expected
