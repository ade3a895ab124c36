"""Recorded environments of launchers, and the launch that each describes."""

import pytest

from jaxgpt.cluster.environment import find_launch, started_by_srun
from jaxgpt.config import UsageError

# Host and job names replaced. An allocation of Slurm: what a batch script sees, without a step.
ALLOCATION = {
    "SLURM_JOB_ID": "13",
    "SLURM_JOB_NODELIST": "nid[001,004]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# A step of part of an allocation: salloc -N 3 -n 7 srun -N 2 -n 3, Slurm 22.05, process 2.
STEP = ALLOCATION | {
    "SLURM_JOB_NODELIST": "nid[001,004-005]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "nid[001,004]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
# The shell that salloc gives with LaunchParameters=use_interactive_step, as at Perlmutter.
INTERACTIVE = ALLOCATION | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "nid001",
}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_APID": "0d2a",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_UNIVERSE_SIZE": "8",
    "PBS_JOBID": "123.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
    "PBS_NODEFILE": "/var/spool/pbs/aux/123",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "login1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL = {
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
    "I_MPI_HYDRA_UUID": "2f170000-98cd",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_VERSION": "5.0.11",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-login1-5955@1",
}
# mpiexec (MPICH) inside salloc -N 2 -n 4: it starts one proxy a node by srun, so that its four
# processes carry the variables of a step of two. Process 3.
MPICH_IN_SLURM = (
    STEP
    | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    | {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
)
SRUN_PMI2 = STEP | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "10.0", "PMI_FD": "11"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "through", "rank", "size"),
    [
        (PALS, "Cray PALS", "mpi", 5, 8),
        (PALS | {"RANK": "0", "WORLD_SIZE": "1"}, "Cray PALS", "mpi", 5, 8),
        (MPICH | {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": "/x"}, "MPICH", "mpi", 1, 2),
        (MPICH, "MPICH", "mpi", 1, 2),
        (MPICH_IN_SLURM, "MPICH", "mpi", 3, 4),
        (OPEN_MPI, "Open MPI", "mpi", 1, 2),
        (OPEN_MPI | ALLOCATION, "Open MPI", "mpi", 1, 2),
        (INTEL, "Intel MPI", "mpi", 1, 2),
        (SRUN_PMI2, "Slurm with PMI", "mpi", 2, 3),
        (SRUN_PMI2 | {"SLURM_MPI_TYPE": "pmi2"}, "Slurm with PMI", "tcp", 2, 3),
        (MPICH_IN_SLURM | {"SLURM_MPI_TYPE": "pmi2"}, "MPICH", "mpi", 3, 4),
        (STEP | {"PMIX_RANK": "2"}, "Slurm with PMI", "mpi", 2, 3),
        (STEP, "Slurm", "tcp", 2, 3),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "Slurm", None, 0, 1),
        (ALLOCATION, "single process", None, 0, 1),
        (INTERACTIVE, "single process", None, 0, 1),
        (INTERACTIVE | {"PMIX_RANK": "0", "PMI_RANK": "0"}, "single process", None, 0, 1),
        (INTERACTIVE | MPICH, "MPICH", "mpi", 1, 2),
        (STEP | {"PALS_RANKID": "2"}, "Slurm with PMI", "mpi", 2, 3),
        ({"PBS_JOBID": "1.pbs", "PBS_NODEFILE": "/x"}, "single process", None, 0, 1),
        ({}, "single process", None, 0, 1),
        (TORCHRUN, "RANK and WORLD_SIZE", "tcp", 3, 4),
        (TORCHRUN | STEP | {"TORCHELASTIC_RUN_ID": "x"}, "RANK and WORLD_SIZE", "tcp", 3, 4),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK and WORLD_SIZE", None, 0, 1),
        (
            MPICH | {"JAXGPT_COORDINATOR": "a:1", "JAXGPT_RANK": "0", "JAXGPT_SIZE": "3"},
            "by hand",
            "tcp",
            0,
            3,
        ),
    ],
)
def test_each_environment_is_seen_as_what_it_is(environ, launcher, through, rank, size):
    launch = find_launch(environ)
    assert launch.launcher == launcher
    assert (launch.through, launch.rank, launch.size) == (through, rank, size)


def test_processes_of_srun_meet_on_the_first_host_of_the_step():
    launch = find_launch(STEP)
    host, port = launch.address.split(":")
    assert host == "nid001"
    assert 1024 < int(port) < 32768  # Linux gives out ports from 32768 on by itself
    assert find_launch(STEP | {"SLURM_PROCID": "0"}).address == launch.address
    assert find_launch(STEP | {"SLURM_STEP_ID": "1"}).address != launch.address
    on_one = STEP | {"SLURM_STEP_NODELIST": "nid004"}
    assert find_launch(on_one).address.startswith("127.0.0.1:")


def test_only_what_srun_started_itself_can_do_without_mpi():
    assert started_by_srun(SRUN_PMI2)
    assert started_by_srun(STEP | {"PMIX_RANK": "2"})
    assert not started_by_srun(MPICH_IN_SLURM)
    assert not started_by_srun(STEP | OPEN_MPI)
    assert not started_by_srun(MPICH)


def test_the_meeting_place_of_srun_can_be_chosen():
    chosen = STEP | {"JAXGPT_COORDINATOR": "nid009:4000"}
    assert find_launch(chosen).address == "nid009:4000"
    with pytest.raises(UsageError, match="JAXGPT_COORDINATOR=nid009: must be host:port"):
        find_launch(STEP | {"JAXGPT_COORDINATOR": "nid009"})


def test_torchruns_address_can_be_replaced():
    torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "JAXGPT_COORDINATOR": "other:1234"}
    assert find_launch(torchrun).address == "other:1234"


def test_torchruns_own_port_is_left_to_it():
    torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert find_launch(TORCHRUN).address == "node1:29500"
    assert find_launch(torchrun).address == "node1:29501"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAXGPT_RANK": "0"}, "JAXGPT_RANK=0, JAXGPT_SIZE=: .*set both"),
        ({"JAXGPT_SIZE": "2"}, "JAXGPT_RANK=, JAXGPT_SIZE=2: .*set both"),
        ({"JAXGPT_RANK": "x", "JAXGPT_SIZE": "2"}, "JAXGPT_RANK=x: must be a whole number"),
        ({"JAXGPT_RANK": "2", "JAXGPT_SIZE": "2"}, "JAXGPT_RANK=2, JAXGPT_SIZE=2: .*less than"),
        ({"JAXGPT_RANK": "0", "JAXGPT_SIZE": "2"}, "JAXGPT_COORDINATOR=: must be host:port"),
        (
            {"JAXGPT_RANK": "0", "JAXGPT_SIZE": "2", "JAXGPT_COORDINATOR": "node1"},
            "JAXGPT_COORDINATOR=node1: must be host:port",
        ),
        (
            {"JAXGPT_RANK": "0", "JAXGPT_SIZE": "2", "JAXGPT_COORDINATOR": "node..1:29500"},
            "JAXGPT_COORDINATOR=node..1:29500: must be host:port",
        ),
        ({"PMI_RANK": "one"}, "PMI_RANK=one"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2: MASTER_ADDR and MASTER_PORT are not set; set both",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
            "WORLD_SIZE=2: MASTER_PORT is not set",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "x"},
            "MASTER_ADDR:MASTER_PORT=node1:x: must be host:port",
        ),
        (
            TORCHRUN
            | {
                "TORCHELASTIC_RUN_ID": "x",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MASTER_PORT": "65535",
            },
            r"MASTER_PORT \+ 1=node1:65536: must be host:port",
        ),
        (STEP | {"SLURM_STEP_NODELIST": "nid[001"}, r"SLURM_STEP_NODELIST=nid\[001"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ, words):
    with pytest.raises(UsageError, match=words):
        find_launch(environ)
