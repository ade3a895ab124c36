import threading

import jax
import pytest

from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.runtime.compile_cache import _is_shared, use_compile_cache


@pytest.fixture
def on_a_gpu(monkeypatch):
    """JAX reports a GPU; its settings are restored afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_gpus_of_several_hosts_use_no_cache_that_not_all_of_them_see(
    on_a_gpu, tmp_path, monkeypatch
):
    """A process with a cache miss would wait forever for one with a hit to start autotuning."""
    assert use_compile_cache(str(tmp_path), ProcessGroup("test")).startswith(
        f"compile cache: {tmp_path}"
    )
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    # As on another host, where the folder of this name lacks the file that process 0 wrote.
    monkeypatch.setattr(ProcessGroup, "broadcast", lambda self, name: f"{name}-of-another-host")
    line = use_compile_cache(str(tmp_path), ProcessGroup("test"))
    assert line.startswith(f"warning: compile_cache={tmp_path}: is not one folder that all hosts")
    assert jax.config.jax_compilation_cache_dir is None


def test_each_call_selects_the_folder_for_later_programs(on_a_gpu, tmp_path):
    for number, directory in enumerate((tmp_path / "a", tmp_path / "b", "off")):
        use_compile_cache(str(directory), ProcessGroup("test"))
        jax.jit(lambda x, number=number: x * number + number)(1.0)
    assert [len([*(tmp_path / name).glob("*/*-cache")]) for name in "ab"] == [1, 1]


@pytest.mark.parametrize(("folders", "shared"), [("aa", True), ("ab", False)])
def test_a_cache_is_shared_if_each_process_has_the_file_in_its_own_folder(
    folders, shared, tmp_path
):
    """Hosts with different processors use different folders, even if both can see both."""
    barrier, values, found = threading.Barrier(2), [None, None], [None, None]

    class Together(Monitor):
        def combine(self, value, function):
            values[self.rank] = value
            barrier.wait(10)
            given = function(list(values))
            barrier.wait(10)
            return given

    def process(rank):
        folder = tmp_path / folders[rank]
        folder.mkdir(exist_ok=True)
        monitor = Together()
        monitor.rank = rank
        cluster = ProcessGroup("test", rank=rank, size=2, monitor=monitor)
        found[rank] = _is_shared(folder, cluster)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for act in ("start", "join"):
        for thread in threads:
            getattr(thread, act)()
    assert found == [shared, shared]
