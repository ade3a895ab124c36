"""What travels with signs of life."""

import queue
import threading
import time

from jaxgpt.cluster.health import heartbeat
from jaxgpt.cluster.process_group import ProcessGroup


def test_process_0_hears_the_last_words_of_each_process(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.05)
    address, made = queue.Queue(), {rank: heartbeat.Heartbeats(None, print) for rank in range(3)}

    class Group(ProcessGroup):
        def broadcast(self, value):
            if value is None:
                return address.get(timeout=30)
            for _ in range(2):
                address.put(value)
            return value

    def connect(rank):
        names = {"hosts": (0, 0, 0), "host_names": ("a", "a", "b")}
        made[rank].connect(Group("test", rank=rank, size=3, local_size=3, **names))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(5):  # faster than the beats: what was not sent is replaced
        for rank, beats in made.items():
            beats.tell(f"[{rank}, {number}, {'9' * 5000}]")
    deadline = time.monotonic() + 30
    wanted = {rank: f"[{rank}, 4, {'9' * 5000}]" for rank in range(3)}
    while made[0].heard != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert made[0].heard == wanted
    assert made[1].heard == made[2].heard == {}
    for beats in made.values():
        beats.close()
