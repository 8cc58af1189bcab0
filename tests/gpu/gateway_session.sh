#!/usr/bin/env bash
# What the gateway costs on one GPU: the endpoint against SGLang's own HTTP server, same engine settings.
#
#   tests/gpu/gateway_session.sh OUT SECONDS [RUN...]
#
# Needs python3 with torch and triton, nvcc, and SGLang and Ray on PYTHONPATH; no install of this
# project. RUN, one measurement each (default: 31 deep 0): a budget of the built-in pair's tree, 0 for
# plain decoding; or deep, a pair of 13 G made-up parameters whose step takes milliseconds. Into OUT:
#   gateway_RUN.json, gateway_RUN.txt, build.txt
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
runs=("$@")
[ ${#runs[@]} -gt 0 ] || runs=(31 deep 0)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3} device=${DEVICE:-cuda}
use_checkout "$root" kernels workers orchestrator clusters
export PYTHONPATH=$work/plugin:$PYTHONPATH
if [ "$device" = cuda ]; then
  export OVERSTORY_KERNELS=cuda
  {
    nvidia-smi
    nproc
    build_kernels "$python"
  } >"$out/build.txt" 2>&1 || echo "build FAILED" >>"$out/build.txt"
fi
# A caller's own options, in their place.
read -r -a options <<<"${OPTIONS:---requests 32 --tokens 512 --rounds 4}"
read -r -a deep_options <<<"${DEEP_OPTIONS:---requests 4 --tokens 128 --rounds 3 --set engine.mem_fraction_static=0.7 --set engine.max_total_tokens=65536}"
for run in "${runs[@]}"; do
  left=$((seconds - SECONDS - 10))
  [ $left -gt 60 ] || break
  case $run in
    deep) what=(--pair deep --budget 31 "${deep_options[@]}") ;;
    *) what=(--budget "$run" "${options[@]}") ;;
  esac
  begun=$SECONDS
  timeout -k 10 "$left" "$python" "$root/tests/cluster/measure_gateway.py" --device "$device" \
    --together --json "$out/gateway_$run.json" "${what[@]}" >"$out/gateway_$run.txt" 2>&1
  echo "$run: exit $? in $((SECONDS - begun)) s" | tee -a "$out/build.txt"
  tail -c 2500 "$out/gateway_$run.txt"
  # Where it failed: what Ray's processes said last.
  [ -f "$out/gateway_$run.json" ] || for log in $(ls -t /tmp/overstory-ray-*/r/session_*/logs/*.{err,log} 2>/dev/null | head -12); do
    echo "==== $log"
    tail -c 3000 "$log"
  done >"$out/logs_$run.txt" 2>&1
done
