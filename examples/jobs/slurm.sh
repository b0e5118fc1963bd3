#!/usr/bin/env bash
# A Slurm job of two machines: sbatch examples/jobs/slurm.sh examples/digits.py --epochs 8
# It starts again from its checkpoint when Slurm puts it back into the queue.
#SBATCH --job-name=overlap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out
set -euo pipefail

ranks_per_machine="${RANKS_PER_MACHINE:-2}" # with GPUs: one for each, and --gpus-per-node above
program="${1:?a training script, and its arguments}"
shift

first_machine="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export OMP_NUM_THREADS="$((SLURM_CPUS_PER_TASK / ranks_per_machine))"

# One torchrun on each machine; a failed rank ends all of them, and the job starts again, three times at most.
if ! srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="$ranks_per_machine" \
    --max-restarts=0 \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first_machine:29500" \
    "$program" --checkpoint "checkpoints-$SLURM_JOB_NAME" "$@"; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit 1
fi
