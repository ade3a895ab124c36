import dataclasses
import os
from pathlib import Path

import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError
from jaxgpt.doctor.directory import (
    HostView,
    check_writable,
    directory_checks,
    evaluate,
    file_system_of,
)

VIEW = HostView("node0", None, True, "lustre", 2**40, "work")


def checks(**second):
    """What is said of two hosts, by name."""
    views = [VIEW, dataclasses.replace(VIEW, host_name="node1", **second)]
    return {c.name: c for c in evaluate(Path("/runs"), views)}


def test_a_shared_directory():
    assert {c.status for c in checks().values()} == {"OK"}
    assert "lustre, 1,024 GiB free" in checks()["file system"].finding


@pytest.mark.parametrize(
    ("name", "status", "second", "finding", "remedy"),
    [
        ("run directory", "FAIL", {"sees_file": False}, "node1 does not see", "all hosts share"),
        ("run directory", "FAIL", {"error": "Read-only file system"}, "on node1 (Read", "quota"),
        ("file locks", "WARN", {"locks": "let in"}, "not locked on node1", "flock"),
        ("file locks", "WARN", {"locks": "not supported"}, "node1 cannot lock", "flock"),
    ],
)
def test_what_another_host_misses(name, status, second, finding, remedy):
    check = checks(**second)[name]
    assert check.status == status
    assert finding in check.finding and remedy in check.remedy


@pytest.mark.parametrize("view", [{"free": 2**20}, {"file_system": "tmpfs"}])
def test_a_place_that_will_not_last(view):
    check = evaluate(Path("/runs"), [dataclasses.replace(VIEW, **view)])[1]
    assert (check.name, check.status) == ("file system", "WARN")


def test_nothing_is_left_behind(tmp_path):
    directory = tmp_path / "a" / "b"
    found = directory_checks(ProcessGroup("test"), directory)
    assert [c.status for c in found if c.name != "file system"] == ["OK", "OK"]
    check_writable(directory)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=f"out={file}/x: cannot be written"):
        check_writable(file / "x")
    (check,) = directory_checks(ProcessGroup("test"), file / "x")
    assert (check.status, "--out" in check.remedy) == ("FAIL", True)


def test_the_innermost_mount_counts():
    mounts = "x / ext4 rw 0 0\nx /a\\040b tmpfs rw 0 0\nx /lus nfs rw 0 0\ny /lus lustre rw 0 0\n"
    assert file_system_of(Path("/a b/c"), mounts) == "tmpfs"
    assert file_system_of(Path("/ab"), mounts) == "ext4"
    assert file_system_of(Path("/lus/x"), mounts) == "lustre"
    assert file_system_of(Path("/"), "") == "unknown"
    if os.path.exists("/proc/mounts"):
        assert file_system_of(Path("/proc")) == "proc"
