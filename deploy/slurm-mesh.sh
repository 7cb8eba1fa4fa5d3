#!/usr/bin/env bash
# One model on the GPUs of several nodes, a process for each node. Process 0 prints.
#
#     sbatch deploy/slurm-mesh.sh generate Qwen/Qwen3-235B-A22B --prompt-file question.txt --n 64 --expert 16
#
#SBATCH --job-name=jaxshare-mesh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=04:00:00
set -euo pipefail

: "${1:?give a command, generate, workers or evaluate, with its arguments}"

# Each process finds its number, and the address of process 0, in the variables of the job. Where
# one is lost, the others end within a minute.
srun --kill-on-bad-exit=1 jaxshare "$@" --distributed
