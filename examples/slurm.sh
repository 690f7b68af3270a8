#!/bin/bash
# A training on two hosts with four GPUs each: sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# JAX: one process for each host (above). PyTorch: --ntasks-per-node=4, one process for each GPU.
export KERAS_BACKEND="${KERAS_BACKEND:-jax}"

status=0
srun --kill-on-bad-exit=1 python anywhere.py --folder runs/anywhere || status=$?

# 143 (128 + SIGTERM): lockstep.Checkpoint has saved before the time limit. The job resumes later.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
