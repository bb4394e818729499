"""A process finds its place in the job: torchrun's variables, else those of a SLURM step, else it is alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.distributed.launch import FIRST_PORT, PORTS, Launch, find_launch, first_host
from forge.errors import RunError
from forge.logging import several_processes

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


def test_alone_without_a_launcher():
    assert find_launch({}) == Launch() and not several_processes({})


def test_torchrun_says_it_all():
    assert find_launch(TORCHRUN) == Launch(5, 1, 8, "10.0.0.1", 29400)
    assert several_processes(TORCHRUN)


def test_torchrun_comes_before_the_slurm_that_started_it():
    assert find_launch({**SLURM, **TORCHRUN}).rank == 5
    assert find_launch({**SLURM, "WORLD_SIZE": "1"}) == Launch() and not several_processes({**SLURM, "WORLD_SIZE": "1"})


def test_a_slurm_step_meets_at_its_first_host_at_a_port_of_the_job():
    place = find_launch(SLURM)
    assert (place.rank, place.local_rank, place.world_size, place.address) == (3, 1, 4, "gpu07")
    assert place.port == FIRST_PORT + 4711 * 7 % PORTS
    assert place.port != find_launch({**SLURM, "SLURM_STEP_ID": "1"}).port
    assert several_processes(SLURM)


def test_the_address_of_a_slurm_step_can_be_given():
    place = find_launch({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (place.address, place.port) == ("head", 1234)


def test_an_sbatch_script_outside_srun_is_one_process():
    script = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert find_launch(script) == Launch() and not several_processes(script)


@given(job=st.integers(0, 10**8), step=st.integers(0, 10**4))
def test_every_job_has_a_port_that_can_be_listened_on(job, step):
    port = find_launch({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
    assert 1024 < port < 32768


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,20],login1", "gpu007"),
        ("rack[1-2]node[03,05],x", "rack1node03"),
        ("a[1,3].cluster.org,b2", "a1.cluster.org"),
    ],
)
def test_the_first_host_of_a_nodelist(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({**TORCHRUN, "RANK": "8"}, "RANK = 8 .* 8 processes"),
        ({**TORCHRUN, "WORLD_SIZE": "x"}, "WORLD_SIZE = 'x'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT = '70000' .* from 0 to 65535"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**SLURM, "SLURM_PROCID": "-1"}, "SLURM_PROCID = '-1'"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(env, names):
    with pytest.raises(RunError, match=names):
        find_launch(env)
