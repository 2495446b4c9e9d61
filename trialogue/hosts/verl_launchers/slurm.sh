#!/usr/bin/env bash
#SBATCH --job-name=§{name}
#SBATCH --nodes=§{nodes}
#SBATCH --gpus-per-node=§{gpus}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=§{cpus}
#SBATCH --time=48:00:00
#SBATCH --output=§{folder}/slurm-%j.log
# Starts Ray on every machine of the allocation, waits until all have joined, then starts verl on the first one:
#   sbatch slurm.sh [KEY=VALUE of verl…]
# The user's key has to be set where sbatch is called. RAY_PORT and RAY_SECONDS change the port and the patience.
set -euo pipefail

port=${RAY_PORT:-6379}
seconds=${RAY_SECONDS:-600}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts[0]}
export RAY_ADDRESS="$first:$port"

on() { # run a command on one machine, for as long as it lasts
  srun --nodes=1 --ntasks=1 --nodelist="$1" --export=ALL "${@:2}" &
}
trap 'jobs -p | xargs -r kill 2> /dev/null || true' EXIT

on "$first" env -u RAY_ADDRESS ray start --head --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block
python -m trialogue.hosts.ray_nodes --address "$RAY_ADDRESS" --nodes 1 --seconds "$seconds"
for host in "${hosts[@]:1}"; do
  on "$host" env -u RAY_ADDRESS ray start --address="$first:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block
done
python -m trialogue.hosts.ray_nodes --address "$RAY_ADDRESS" --nodes "${#hosts[@]}" --seconds "$seconds"
"§{folder}/launch.sh" "$@"
