import itertools

import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.checks import check_clocks


@pytest.mark.parametrize(("ahead", "status"), [((0.0, 3.0, -0.5), "WARN"), ((0.0, 0.9, 0.1), "OK")])
def test_hosts_whose_clocks_differ_are_named(monkeypatch, ahead, status):
    """A process that leaves one barrier late has a correct clock nevertheless."""
    late = itertools.chain([5.0], itertools.repeat(0.0))

    def allgather(self, value):
        times = [1e9 + seconds for seconds in ahead]
        return value if value is None else [times[0], times[1], times[2] + next(late)]

    monkeypatch.setattr(ProcessGroup, "allgather", allgather)
    cluster = ProcessGroup("test", size=3, hosts=(0, 1, 2), host_names=("node0", "node1", "node2"))
    check = check_clocks(cluster)
    assert check.status == status
    assert ("node1 is 3.500 s ahead of node2" in check.finding) == (status == "WARN")


def test_clocks_are_not_compared_on_a_single_host():
    assert check_clocks(ProcessGroup("test")).status == "OK"
