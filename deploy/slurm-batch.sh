#!/usr/bin/env bash
# A batch job on one node. Where it runs out of time, or its node is lost, it is queued again and
# goes on: nothing is sampled twice.
#
#     sbatch deploy/slurm-batch.sh Qwen/Qwen3-0.6B prompts.jsonl out.jsonl --n 16
#
#SBATCH --job-name=jaxshare-batch
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# The script gets this signal so many seconds before the end of its time.
#SBATCH --signal=B:USR1@120
set -euo pipefail

model=${1:?give a model, a file of prompts and a file for the results}
input=${2:?give a file of prompts after the model}
output=${3:?give a file for the results after that of the prompts}
shift 3

requeue() {
  kill -TERM "$!"
  wait "$!" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}

# Before the job starts: the signal may come as soon as it has.
trap requeue USR1
srun jaxshare batch "$model" --input "$input" --output "$output" --resume "$@" &
wait "$!"
