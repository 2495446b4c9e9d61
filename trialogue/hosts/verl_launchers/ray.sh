#!/usr/bin/env bash
# Starts Ray on machines of your own, then verl:
#   ray.sh head                       on the first machine
#   ray.sh join FIRST                 on each of the others
#   ray.sh run [KEY=VALUE of verl…]   on the first machine: waits until all §{nodes} have joined
# The user's key has to be set before `ray.sh head` and `ray.sh join`, because verl's workers inherit it from there.
set -euo pipefail

port=${RAY_PORT:-6379}
case "${1:-}" in
head)
  ray start --head --port="$port" --disable-usage-stats
  ;;
join)
  ray start --address="${2:?name the first machine: ray.sh join FIRST}:$port" --disable-usage-stats
  ;;
run)
  export RAY_ADDRESS=${RAY_ADDRESS:-127.0.0.1:$port}
  python -m trialogue.hosts.ray_nodes --address "$RAY_ADDRESS" --nodes §{nodes} --seconds "${RAY_SECONDS:-600}"
  exec "§{folder}/launch.sh" "${@:2}"
  ;;
*)
  echo "usage: ray.sh head | ray.sh join FIRST | ray.sh run [KEY=VALUE…]" >&2
  exit 2
  ;;
esac
