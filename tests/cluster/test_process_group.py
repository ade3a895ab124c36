import socket
import sys
import threading
import time

import pytest

from jaxgpt.cluster.environment import MPI_LAUNCHERS, Launch
from jaxgpt.cluster.hosts import address_towards, reachable_name
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.process_group import ProcessGroup, connect_to_rank0, join_process_group
from jaxgpt.cluster.shutdown import PeerLost
from jaxgpt.config import UsageError
from readme_code import load_block


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable, *_ in MPI_LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


def test_without_a_launcher_mpi_is_not_touched(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it would fail
    alone = join_process_group()
    assert (alone.rank, alone.size, alone.is_main) == (0, 1, True)
    assert alone.broadcast({"a": [1]}) == {"a": [1]}
    with pytest.raises(UsageError, match="wrong"):
        alone.raise_if_any("wrong")


def test_a_missing_mpi_library_is_explained(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"PMI_RANK=0: .*jaxgpt\[mpi\]"):
        join_process_group()


def free_address():
    with socket.socket() as s:
        s.bind(("", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def at_once(act, arguments):
    threads = [threading.Thread(target=act, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_two_processes_of_a_host_have_the_same_place():
    address, found = free_address(), {}

    def take_part(rank):
        launch = Launch("test", rank=rank, size=4, address=address, through="tcp")
        found[rank] = join_process_group(20.0, launch=launch)

    at_once(take_part, range(4))
    assert [found[rank].local_rank for rank in range(4)] == [0, 1, 2, 3]
    assert {found[rank].local_size for rank in range(4)} == {4}


def test_all_get_every_value_in_order_of_rank():
    address, found = free_address(), {}

    def take_part(rank):
        launch = Launch("test", rank=rank, size=5, address=address, through="tcp")
        with join_process_group(20.0, launch=launch) as group:
            values = [f"{i}:{rank}" * 10 ** (2 * i) for i in range(4)]
            found[rank] = [group.allgather(value) for value in values], group.broadcast(rank)

    at_once(take_part, [3, 0, 4, 1, 2])
    expected = [[f"{i}:{rank}" * 10 ** (2 * i) for rank in range(5)] for i in range(4)]
    assert found == dict.fromkeys(range(5), (expected, 0))


def test_strangers_at_the_door_are_sent_away():
    address, found = free_address(), {}

    def take_part(rank):
        launch = Launch("test", rank=rank, size=2, address=address, through="tcp")
        with join_process_group(20.0, launch=launch) as group:
            found[rank] = group.allgather(rank)

    process_0 = threading.Thread(target=take_part, args=(0,))
    process_0.start()
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"[1]\n", b""):
        connect_to(address).sendall(noise)
    take_part(1)
    process_0.join()
    assert found == {0: [0, 1], 1: [0, 1]}


def connect_to(address):
    host, port = address.split(":")
    for _ in range(100):
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.05)
    raise TimeoutError


def test_a_host_whose_name_is_loopback_is_reached_by_address(monkeypatch):
    loopback = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getfqdn", lambda: "debian")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: loopback)
    assert reachable_name() != "debian"
    good = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: good)
    assert reachable_name() == "debian"


def test_a_broadcast_address_also_has_a_route():
    assert address_towards("127.255.255.255") == "127.0.0.1"  # broadcast address of loopback


@pytest.mark.parametrize("name", ["node..1", "n" * 64])
def test_a_malformed_host_name_cannot_be_reached(name, monkeypatch):
    with pytest.raises(OSError, match=f"{name}: is not a valid host name"):
        address_towards(name)
    with pytest.raises(PeerLost, match=f"cannot reach process 0 at {name}:29500"):
        connect_to_rank0(f"{name}:29500", 1, 0.0)
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    assert reachable_name()


def test_a_job_can_be_left_and_joined_again(monkeypatch):
    address, found = free_address(), {0: [], 1: []}

    def take_part(rank):
        launch = Launch("test", rank=rank, size=2, address=address, through="tcp")
        for number in range(3):
            with join_process_group(20.0, launch=launch) as group:
                found[rank].append(group.allgather([number, rank]))

    at_once(take_part, range(2))
    assert found[0] == found[1] == [[[n, 0], [n, 1]] for n in range(3)]
    for _ in range(2):
        with join_process_group() as alone:
            assert alone.allgather("here") == ["here"]


def test_a_closed_group_gives_up_what_it_held():
    given_up = []
    with ProcessGroup("test") as group:
        group.on_close.callback(given_up.append, "lock")
        assert given_up == []
    assert given_up == ["lock"]


def test_what_one_process_finds_wrong_stops_all():
    class Three(Monitor):
        def combine(self, value, function):
            return function([value, "second", "third"])

    with pytest.raises(UsageError, match="second"):
        ProcessGroup("test", size=3, monitor=Three()).raise_if_any(None)


def test_the_example_in_the_readme(tmp_path):
    example = load_block("jaxgpt/cluster/README.md", "two_jobs", tmp_path)
    assert example.two_jobs() == [["first job, rank 0"], ["second job, rank 0"]]
