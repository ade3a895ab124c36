"""MPI libraries other than MPICH, which the other tests use. They are installed from wheels.

mpi4py's wheel works with each of them if MPI4PY_LIBMPI names the library and PATH has its mpiexec.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import environment, run

HERE = Path(__file__).parent
LIBRARIES = [
    pytest.param("openmpi>=5", "libmpi.so.40", "Open MPI", id="openmpi"),
    pytest.param("impi-rt>=2021.16", "libmpi.so.12", "Intel(R) MPI Library", id="impi"),
]
# As root, and with more processes than cores, Open MPI wants to be asked.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.fixture
def prefix(request, tmp_path_factory):
    """A folder with the library that the test asks for."""
    requirement = request.param
    folder = tmp_path_factory.mktemp("mpi")
    install = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-cache-dir",
         "--disable-pip-version-check", "--prefix", folder, requirement],
        capture_output=True, text=True,
    )  # fmt: skip
    if install.returncode:
        pytest.skip(f"pip cannot install {requirement}: {install.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("prefix", "library", "name"), LIBRARIES, indirect=["prefix"])
def test_the_doctor_finds_nothing_wrong(prefix, library, name, tmp_path):
    path = f"{prefix}/bin:{environment()['PATH']}"
    libmpi = str(prefix / "lib" / library)
    job = run(
        HERE / "quick_doctor.py", "--json", "--out", tmp_path, processes=2,
        PATH=path, MPI4PY_LIBMPI=libmpi, **OPEN_MPI,
    )  # fmt: skip
    assert "{\n" in job.stdout, job.stdout
    report = json.loads(job.stdout[job.stdout.index("{\n") :])
    assert [c for c in report["checks"] if c["status"] == "FAIL"] == []
    assert job.returncode == 0
    checks = {c["name"]: c for c in report["checks"]}
    assert name in checks["versions"]["finding"]
    assert "2 processes on it" in checks["hosts"]["finding"]
    assert "all devices end with the same parameters" in checks["training"]["finding"]
