#!/usr/bin/env bash
# A run of forge on SLURM, on any number of nodes: sbatch scripts/slurm.sh [flags of cli.py train]
#
# It goes on by itself. Before the time limit, and when the job is preempted, every rank gets a signal; all of them save at
# the same step and end with status 128 + the signal's number, and the job goes back to the queue. When it starts again, the
# same command goes on from the newest checkpoint, bit for bit. A node that fails does the same without the save.

#SBATCH --job-name=forge
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8             # one process a GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue                       # after a preemption or a failure of a node
#SBATCH --signal=USR1@120               # to every rank, 120 s before the time limit: more than a step and a checkpoint take
#SBATCH --open-mode=append              # the log of the job goes on too
#SBATCH --output=slurm-%j.log

set -uo pipefail

# Put your environment here: `module load ...`, `. .venv/bin/activate`.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export TORCH_CPP_LOG_LEVEL=ERROR        # where a rank is lost, only forge's own line about it

# This shell lives on while its ranks save: bash waits for srun before it looks at a signal.
trap : TERM USR1

# No torchrun: rank, world size and address come from SLURM's own variables. A rank that fails or hangs ends all others
# (distributed.watchdog_seconds); --kill-on-bad-exit ends those that can no longer end themselves.
srun --kill-on-bad-exit=1 python cli.py train --config configs/llama_1b.toml \
    --checkpoint.interval 500 --checkpoint.async-save \
    --checkpoint.stop-within-seconds 110 \
    --distributed.watchdog-seconds 600 \
    "$@"
status=$?

# 138 = 128 + USR1 (the time limit), 143 = 128 + TERM (preemption): there is more to train.
if [ "$status" -eq 138 ] || [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
