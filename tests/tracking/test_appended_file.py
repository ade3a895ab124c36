import sys
import threading

from jaxgpt.tracking.appended_file import AppendedFile


def test_threads_may_write_at_the_same_time(tmp_path):
    """The thread that receives a stop signal logs while the run's own thread does."""
    file, errors = AppendedFile(tmp_path / "log"), []

    def write(name):
        try:
            for i in range(500):
                file.write(f"{name} {i}\n")
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} {i}" for name in "ab" for i in range(500))
