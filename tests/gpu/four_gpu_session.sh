#!/usr/bin/env bash
# What needs four GPUs of one host: TP 4, and two replicas of TP 2 with GPUs of their own.
#
#   tests/gpu/four_gpu_session.sh OUT SECONDS
#
# Some 480 seconds: two fifths for engines of TP 4 and 2 and deployments of TP 4, all side by side, the
# rest for rolling restarts of two replicas of TP 2 with hand-off and without, side by side with
# nothing else. two_gpu_session.sh runs them and says what they need. Give it SLICE_MODULES: without
# them two engines were up after 110 s, with them after 40, and 10,000 steps of two ranks take 63 s
# more. To rehearse them on a CPU give it one part at a time with TWO_GPU_TOY=1: here some thirty
# processes run at once.
# Into OUT/engines and OUT/restarts.
set -uo pipefail
out=${1:?folder for the results} seconds=${2:?seconds in all}
session=$(cd "$(dirname "$0")" && pwd)/two_gpu_session.sh
"$session" "$out/engines" $((seconds * 2 / 5)) engines.hand_off engines.hand_off_pair engines.tp4 \
  engines.tp4_custom deployed.tp4_noset1 deployed.tp4_unset
"$session" "$out/restarts" $((seconds - SECONDS)) deployed.pair_on deployed.pair_off
