#!/bin/bash
# Encodes in a SLURM job array and then writes the manifest. On a login node, with the source and options of prep encode:
#
#     PARTS=16 bash slurm.sh SOURCE --model MODEL --cache CACHE -o manifest.json
#
# Source, model and cache are on a disk that all nodes share. To finish what is missing, run the same again.
#SBATCH --job-name=prep-encode
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -eu
export PARTS="${PARTS:-8}"

if [ -z "${SLURM_JOB_ID:-}" ]; then  # on the login node
    array=$(sbatch --parsable --export=ALL --array="0-$((PARTS - 1))" "$0" "$@")
    exec sbatch --export=ALL,STEP=seal --dependency="afterok:${array%%;*}" "$0" "$@"
fi

if [ "${STEP:-encode}" = seal ]; then
    exec srun prep seal "$@" --parts "$PARTS"
fi

code=0
srun prep encode "$@" --part "$SLURM_ARRAY_TASK_ID/$PARTS" --device "${DEVICE:-all}" --grace 100 || code=$?
if [ "$code" = 75 ]; then  # stopped by a signal, two minutes before the time limit or by preemption: go on later
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
