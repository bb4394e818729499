"""Which process of how many this is, as torchrun, SLURM's srun, or a shell with the same variables says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from attrs import frozen

from forge.errors import RunError
from forge.logging import in_slurm_step

FIRST_PORT, PORTS = 15000, 15000
"""Below the ports that Linux gives to outgoing connections, which begin at 32768."""


@frozen
class Launch:
    """This process's place in the job, and where rank 0 listens."""

    rank: int = 0
    local_rank: int = 0  # on its machine
    world_size: int = 1
    address: str = ""
    port: int = 0


def find_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """This process's place as the launcher's variables say; alone where there are none.

    torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) come before those of a SLURM step, so
    torchrun may itself be started by srun. A SLURM step has no address: it is the first host of the step, and a port
    that follows from the job's number; MASTER_ADDR and MASTER_PORT override the two. An sbatch script outside srun is
    one process, however many tasks the job asked for.

    Raises:
        RunError: a variable is missing or makes no sense.
    """
    if "WORLD_SIZE" in env:
        world_size = _number(env, "WORLD_SIZE", least=1)
        if world_size == 1:
            return Launch()
        names, defaults = ("RANK", "LOCAL_RANK"), {"LOCAL_RANK": "0", **env}
    elif in_slurm_step(env):
        names, defaults = ("SLURM_PROCID", "SLURM_LOCALID"), {**_slurm_address(env), **env}
        world_size = _number(env, "SLURM_NTASKS", least=1)
        if world_size == 1:
            return Launch()
    else:
        return Launch()
    rank = _number(defaults, names[0])
    if rank >= world_size:
        raise RunError(f"{names[0]} = {rank} in the environment is not a rank of {world_size} processes: unset both")
    local_rank = _number(defaults, names[1])
    return Launch(
        rank, local_rank, world_size, _text(defaults, "MASTER_ADDR"), _number(defaults, "MASTER_PORT", most=65535)
    )


def first_host(nodelist: str) -> str:
    """The first host of SLURM's short form: `gpu[007-012,20],login1` -> `gpu007`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _slurm_address(env: Mapping[str, str]) -> dict[str, str]:
    """Two steps of one job at once get two ports."""
    job, step = _number(env, "SLURM_JOB_ID"), env.get("SLURM_STEP_ID", "0")
    port = FIRST_PORT + (job * 7 + (int(step) if step.isdigit() else 0)) % PORTS
    return {"MASTER_ADDR": first_host(_text(env, "SLURM_STEP_NODELIST")), "MASTER_PORT": str(port)}


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise RunError(
            f"{name} is not set in the environment of a job of several processes: start it with torchrun or srun"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, least: int = 0, most: int | None = None) -> int:
    text = env.get(name, "")
    if text and not (text.isascii() and text.isdigit() and int(text) >= least and (most is None or int(text) <= most)):
        wanted = f"a number >= {least}" if most is None else f"a number from {least} to {most}"
        raise RunError(f"{name} = {text!r} in the environment must be {wanted}: unset it, or use torchrun or srun")
    return int(_text(env, name))
