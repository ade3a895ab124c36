import socket

import pytest

from jaxgpt.cluster.hosts import expand_node_list, job_hosts, read_host_file
from jaxgpt.config import UsageError


def host_file(folder, text):
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        # PBS: a line for each host, or one for each of its slots
        ("a\nb\n", {"a": None, "b": None}),
        ("b\nb\na\na\n", {"b": 2, "a": 2}),
        ("a\nb\nb\n", {"a": 1, "b": 2}),
        # hosts that share only the beginning
        ("x1\nx10\n", {"x1": None, "x10": None}),
        ("n1.left.org\nn1.right.org\n", {"n1.left.org": None, "n1.right.org": None}),
        ("10.0.0.1\n10.0.0.2\n", {"10.0.0.1": None, "10.0.0.2": None}),
        # MPICH and Intel MPI; Open MPI; DeepSpeed
        ("a:4\nb:2\n", {"a": 4, "b": 2}),
        ("a slots=4 max_slots=8\nb  slots=4\n", {"a": 4, "b": 4}),
        ("a slots=2\na slots=2", {"a": 4}),
        ("a:4 max_slots=8\nb port=22 slots=2 max-slots=8\n", {"a": 4, "b": 2}),
        ("# all of them\n\n  a  # the first\r\nb\n", {"a": None, "b": None}),
    ],
)
def test_a_host_file_gives_each_host_once_with_its_slots(tmp_path, text, hosts):
    found = read_host_file(host_file(tmp_path, text), "HOSTFILE")
    assert list(found.items()) == list(hosts.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no hosts"),
        ("# nothing\n\n", "lists no hosts"),
        ("a\nb c\n", "line 2 is 'b c'"),
        ("a:many\n", "line 1 is 'a:many'"),
        ("a:0\n", "line 1 is 'a:0'"),
        ("a slots=many\n", "line 1 is 'a slots=many'"),
        ("nid[001-003]\n", "line 1"),
        ("\x00\xff\n", "line 1"),
    ],
)
def test_a_host_file_that_is_none_is_refused(tmp_path, text, words):
    path = host_file(tmp_path, text)
    with pytest.raises(UsageError) as refusal:
        read_host_file(path, "PBS_NODEFILE")
    assert str(refusal.value).startswith(f"PBS_NODEFILE={path}: ")
    assert words in str(refusal.value)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()])
def test_a_host_file_that_cannot_be_read_is_named(tmp_path, make):
    make(tmp_path / "gone")
    with pytest.raises(UsageError, match=rf"^PBS_NODEFILE={tmp_path}/gone: .*cannot be read"):
        job_hosts({"PBS_NODEFILE": f"{tmp_path}/gone"})


def test_ten_thousand_hosts_are_read_at_once(tmp_path):
    names = [f"x4{i // 100:03}c{i % 10}.hsn.cm.aurora.alcf.anl.gov" for i in range(10_000)]
    assert len(read_host_file(host_file(tmp_path, "\n".join(names)), "f")) == len(set(names))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # As `scontrol show hostnames` of Slurm 22.05 writes them.
        ("login1", "login1"),
        ("nid[001-003,007],login1", "nid001 nid002 nid003 nid007 login1"),
        ("a[8-11]", "a8 a9 a10 a11"),
        ("a[08-11]", "a08 a09 a10 a11"),
        ("r[1,3]n[1-2,4],r2n9", "r1n1 r1n2 r1n4 r3n1 r3n2 r3n4 r2n9"),
        # That version takes nothing after the last bracket; by the same rules:
        ("x[1-2]c[0-1]n4", "x1c0n4 x1c1n4 x2c0n4 x2c1n4"),
        ("a[1-2,005]-ib,b3", "a1-ib a2-ib a005-ib b3"),
        ("nid[099-101].site.org", "nid099.site.org nid100.site.org nid101.site.org"),
    ],
)  # fmt: skip
def test_a_node_list_is_expanded_in_full(text, names):
    assert expand_node_list(text) == tuple(names.split())


def test_a_host_of_a_node_list_counts_once():
    assert expand_node_list("a[1-3],a2,a[3-4]") == ("a1", "a2", "a3", "a4")


@pytest.mark.parametrize(
    "text",
    ["nid[001-003", "nid001-003]", "nid[]", "nid[3-1]", "nid[a-b]", "nid[1-2-3]", "nid[1,,2]",
     "a,,b", ",a", "a,", "n[1[2-3]]", "(null)", "a b", "nid[1 - 2]"],
)  # fmt: skip
def test_a_malformed_node_list_is_refused(text):
    with pytest.raises(UsageError) as refusal:
        expand_node_list(text, "SLURM_NODELIST")
    assert str(refusal.value).startswith(f"SLURM_NODELIST={text}: ")


def test_the_hosts_of_a_job_are_those_of_its_scheduler(tmp_path):
    given, pbs, mine = (tmp_path / n for n in ("given", "pbs", "mine"))
    given.write_text("g1\n")
    pbs.write_text("p1\np1\np2\np2\n")
    mine.write_text("m1:4\n")
    environ = {
        "HOSTFILE": str(mine),
        "SLURM_JOB_NODELIST": "s[1-2]",
        "PBS_NODEFILE": str(pbs),
    }
    assert job_hosts(environ, str(given)) == ({"g1": None}, "--hosts")
    assert job_hosts(environ) == ({"p1": 2, "p2": 2}, "PBS_NODEFILE")
    del environ["PBS_NODEFILE"]
    assert job_hosts(environ) == ({"s1": None, "s2": None}, "SLURM_JOB_NODELIST")
    del environ["SLURM_JOB_NODELIST"]
    assert job_hosts(environ) == ({"m1": 4}, "HOSTFILE")
    assert job_hosts({}) == ({socket.gethostname(): None}, "this host")
