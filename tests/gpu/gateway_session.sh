#!/usr/bin/env bash
# What the gateway costs on one GPU: the endpoint against SGLang's own HTTP server, same engine settings.
#
#   tests/gpu/gateway_session.sh OUT SECONDS [BUDGET...]
#
# Needs python3 with torch and triton, nvcc, and SGLang and Ray on PYTHONPATH; no install of this
# project. BUDGET: of the tree, 0 for plain decoding (default: 31 0), one measurement each. Into OUT:
#   gateway_BUDGET.json, gateway_BUDGET.txt, build.txt
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
budgets=("$@")
[ ${#budgets[@]} -gt 0 ] || budgets=(31 0)
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
# `set -- ... --tokens N` of a caller's own measurement goes into OPTIONS.
read -r -a options <<<"${OPTIONS:---requests 32 --tokens 512 --rounds 5}"
for budget in "${budgets[@]}"; do
  left=$((seconds - SECONDS - 10))
  [ $left -gt 60 ] || break
  timeout -k 10 "$left" "$python" "$root/tests/cluster/measure_gateway.py" --device "$device" \
    --budget "$budget" --json "$out/gateway_$budget.json" "${options[@]}" \
    >"$out/gateway_$budget.txt" 2>&1
  echo "budget $budget: exit $? after $SECONDS s" | tee -a "$out/build.txt"
  tail -c 2500 "$out/gateway_$budget.txt"
  # Where it failed: what Ray's processes said last.
  [ -f "$out/gateway_$budget.json" ] || for log in $(ls -t /tmp/overstory-ray-*/r/session_*/logs/*.{err,log} 2>/dev/null | head -12); do
    echo "==== $log"
    tail -c 3000 "$log"
  done >"$out/logs_$budget.txt" 2>&1
done
