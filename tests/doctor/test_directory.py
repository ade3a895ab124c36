import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError
from jaxgpt.doctor import directory as module
from jaxgpt.doctor.directory import (
    check_file_system,
    directory_checks,
    file_system_of,
    host_checks,
    scratch_file,
)

TWO_HOSTS = ProcessGroup("test", 1, 2, hosts=(0, 1), host_names=("node0", "node1"))


def test_a_shared_directory_passes(tmp_path):
    with scratch_file(tmp_path) as path:
        shared, file_system = host_checks(path, TWO_HOSTS)
    assert shared.status == "OK" and "the same on all 2 hosts" in shared.finding
    assert "free" in file_system.finding


def test_a_directory_that_another_host_cannot_use_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER", 0)
    (check,) = host_checks(f"{tmp_path}/missing", TWO_HOSTS)
    assert (check.status, "all hosts share" in check.remedy) == ("FAIL", True)
    assert "node1 does not see" in check.finding

    def refuse(dir):
        raise OSError(30, "Read-only file system")

    with scratch_file(tmp_path) as path:
        monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)
        (check,) = host_checks(path, TWO_HOSTS)
    assert (check.status, "quota" in check.remedy) == ("FAIL", True)
    assert "cannot be written to on node1 (Read-only" in check.finding


@pytest.mark.parametrize(("kind", "free"), [("lustre", 2**20), ("tmpfs", 2**40)])
def test_a_full_or_temporary_file_system_is_a_warning(monkeypatch, kind, free):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free))
    monkeypatch.setattr(module, "file_system_of", lambda path: kind)
    check = check_file_system(Path("/runs"))
    assert (check.name, check.status) == ("file system", "WARN")


def test_the_checks_leave_no_files(tmp_path):
    found = directory_checks(ProcessGroup("test"), tmp_path / "a" / "b")
    assert [c.status for c in found if c.name != "file system"] == ["OK"]
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_created_fails(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(UsageError, match=f"out={file}/x: cannot be written"),
        scratch_file(file / "x"),
    ):
        pass
    (check,) = directory_checks(ProcessGroup("test"), file / "x")
    assert (check.status, "--out" in check.remedy) == ("FAIL", True)


def test_the_file_system_of_a_symlink_loop_is_that_of_its_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert file_system_of(tmp_path / "loop") == file_system_of(tmp_path)


def test_the_innermost_mount_is_the_file_system(monkeypatch):
    if Path("/proc/mounts").exists():
        assert file_system_of(Path("/proc")) == "proc"
    mounts = "x / ext4 rw 0 0\nx /a\\040b tmpfs rw 0 0\nx /lus nfs rw 0 0\ny /lus lustre rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path, errors: mounts)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert file_system_of(Path("/a b/c")) == "tmpfs"
    assert file_system_of(Path("/ab")) == "ext4"
    assert file_system_of(Path("/lus/x")) == "lustre"
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert file_system_of(Path("/")) == "unknown"
