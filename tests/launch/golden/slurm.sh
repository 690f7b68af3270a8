#!/bin/bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# One process on each host. They meet at the first host, on a port of this job.
export KERAS_BACKEND="${KERAS_BACKEND:-jax}"
export LOCKSTEP_PROCESSES="$SLURM_JOB_NUM_NODES"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export LOCKSTEP_COORDINATOR="${hosts%%$'\n'*}:$((61440 + SLURM_JOB_ID % 4096))"

status=0
srun --kill-on-bad-exit=1 bash -c 'export LOCKSTEP_PROCESS="$SLURM_PROCID"; exec "$@"' lockstep \
    python train.py --lr 0.1 'it'"'"'s' || status=$?

# 143 (128 + SIGTERM): lockstep.Checkpoint has saved ahead of the time limit. The job goes on later.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
