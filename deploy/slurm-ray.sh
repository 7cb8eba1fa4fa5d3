#!/usr/bin/env bash
# A Ray cluster on the nodes of a job, and a command with --ray on it: a batch, an evaluation, or a
# server with replicas.
#
#     sbatch deploy/slurm-ray.sh batch Qwen/Qwen3-8B --input prompts.jsonl --output out.jsonl --n 16
#
#SBATCH --job-name=jaxshare-ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=08:00:00
set -euo pipefail

: "${1:?give a command, batch, evaluate or serve, with its arguments}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=6379
# Other users of the network have no part in the cluster: it takes a token that only this job has.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

on() {
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${@:2}"
}

address=$(on "${nodes[0]}" hostname --ip-address | awk '{print $1}'):$port
on "${nodes[0]}" ray start --head --node-ip-address="${address%:*}" --port="$port" --block &
for _ in {1..60}; do
  on "${nodes[0]}" ray status --address="$address" &>/dev/null && break
  sleep 2
done
for node in "${nodes[@]:1}"; do
  on "$node" ray start --address="$address" --block &
done

# When it ends, SLURM ends the cluster.
on "${nodes[0]}" jaxshare "$@" --ray "$address"
