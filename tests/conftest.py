"""Settings that all tests share: eight CPU devices, prepared data, the --long flag."""

import os
import signal
from pathlib import Path

import jax
import pytest

from jaxgpt.runtime.xla_flags import QUICK_FUSIONS, add_xla_flags

# Before any test touches JAX. Commands under test start processes of their own, which must not
# inherit a number of devices.
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # commands under test import the same modules
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs with &
jax.config.update("jax_num_cpu_devices", 8)

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the long forms of the checks")


def pytest_configure(config):
    """Without --long, disable optimizations in the compiler, because the tests run few steps.

    A step then compiles in a third of the time, both in this process and in the commands that it
    starts, except for commands with `AS_USERS`.
    """
    if not config.getoption("--long"):
        add_xla_flags("--xla_backend_optimization_level=0", *QUICK_FUSIONS)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long form: give --long"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Give each worker one file at a time, and all multiprocess tests to the same worker.

    Multiprocess jobs use all cores, and some tests time how they end, so they must not overlap.
    """
    from xdist.scheduler import LoadFileScheduling

    class FilesAndJobs(LoadFileScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return "jobs" if scope.startswith("tests/multiprocess/") else scope

    return FilesAndJobs(config, log)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory):
    """Return a temporary $JAXGPT_DATA that contains the prepared `python` dataset."""
    from jaxgpt.data.prepare.builtin import prepare_python

    home = tmp_path_factory.mktemp("data")
    os.environ["JAXGPT_DATA"] = str(home)
    prepare_python(home / "python")
    return home


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Share one compile cache between tests and the commands they run, instead of the user's."""
    from jaxgpt.cluster.process_group import ProcessGroup
    from jaxgpt.runtime.compile_cache import use_compile_cache

    folder = str(tmp_path_factory.mktemp("compiled"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    use_compile_cache(folder, ProcessGroup(launcher="test"))


@pytest.fixture(scope="session")
def tiny_shakespeare():
    """Return the path of the text of Tiny Shakespeare."""
    path = SHARED_DATA / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("Tiny Shakespeare is not in ../shared/data")
    return path


@pytest.fixture(scope="session")
def gpt2_folder():
    """Return the folder that contains GPT-2's encoder.json and vocab.bpe."""
    pytest.importorskip("tokenizers")
    folder = SHARED_DATA / "gpt2"
    if not folder.is_dir():
        pytest.skip("GPT-2's vocabulary is not in ../shared/data/gpt2")
    return folder


@pytest.fixture(scope="session")
def shakespeare(data_home, tiny_shakespeare):
    """Return the folder of the prepared character-level Tiny Shakespeare."""
    from jaxgpt.data.prepare.builtin import prepare_shakespeare_char

    prepare_shakespeare_char(data_home / "shakespeare_char", tiny_shakespeare)
    return data_home / "shakespeare_char"


@pytest.fixture
def exact_products():
    """Compute float32 products exactly; by default, NVIDIA GPUs use TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def layouts_fit(capfd):
    """Fail if XLA had to replicate whole arrays to convert between shardings."""
    from jobs import FIGHT

    yield
    assert FIGHT not in capfd.readouterr().err
