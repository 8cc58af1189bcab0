#!/usr/bin/env bash
# DDTREE inside the real SGLang on one GPU: what the engines say, and how fast.
#
#   tests/gpu/engine_session.sh OUT SECONDS [ROLE...]
#
# Needs python3 with torch and triton, nvcc, and SGLang on PYTHONPATH; no install of this project.
# One process per role (engine_runs.py); all start at once and say their texts side by side, then they
# are timed in turn. A role that fails does not stop the others. By themselves:
# `pairs` (engine_pairs.py), `auto` against the best fixed policies, window by window of a closed loop, and
# leases on against off (for ENGINE_SESSION_LEASES seconds); ENGINE_SESSION_SHAPES="1:0 8:1" names requests and
# temperatures (20 to 30 s each), ENGINE_SESSION_RIVALS="plain chain tree-31" the fixed policies of which the
# best two are rivals; before it, if both are asked for, `stages`, a step's times by the device's clock;
# `host` (engine_host.py), where the host's time of a step goes (in about 75 s after the start);
# `leases`, leases of 64 and of 500 steps against none, and what their parts cost, for all the time there is.
# ENGINE_SESSION_TOY=1 rehearses `pairs`, `host` and `leases` on a CPU. Into OUT:
#   summary.txt   how each ended, what engine_compare.py says, then engine_table.py's tables of speeds and acceptance
#   speeds.csv, speeds.svg  the same, where roles were asked for that time them (OVERSTORY_COMMIT names the commit
#                 of a checkout without its history)
#   results.json  all results; bench.jsonl the speeds alone, one a line as they came
#   logs.txt      the end of every role's output; build.txt  machine and build
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
roles=("$@")
[ ${#roles[@]} -gt 0 ] ||
  roles=(ours stock dflash long_ours long_triton fp32_triton fp32_stock)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
use_checkout "$root" kernels workers orchestrator
PYTHONPATH=$root/tests/gpu:$PYTHONPATH "$python" -c '
import engine_pairs
try:
    engine_pairs.asked_shapes(), engine_pairs.asked_rivals()
except ValueError as error:
    raise SystemExit(error)' || exit 2
mkdir -p "$work/roles"
kernels=cuda
[ "${ENGINE_SESSION_TOY:-0}" != 1 ] || kernels=auto
export OVERSTORY_KERNELS=$kernels

bundle() {
  {
    for role in "${roles[@]}"; do
      echo "======== $role"
      grep -v "Capturing batches" "$work/roles/$role.txt" 2>/dev/null | tail -c 60000
    done
  } >"$out/logs.txt" 2>&1
  "$python" - "$work/roles" "$out/results.json" <<'PY'
import json, pathlib, sys
folder, result = map(pathlib.Path, sys.argv[1:])
found = {}
for file in sorted(folder.glob("*.json")):
    try:
        found[file.stem] = json.loads(file.read_text())
    except ValueError:  # being written
        continue
result.write_text(json.dumps(found))
PY
  for role in "${roles[@]}"; do
    sed "s/^{/{\"engine\": \"$role\", /" "$work/roles/bench-$role.jsonl" 2>/dev/null
  done >"$out/bench.jsonl"
  {
    cat "$work/ends.txt"
    "$python" "$root/tests/gpu/engine_compare.py" "$out/results.json"
    "$python" "$root/tests/gpu/engine_table.py" "$out/results.json" "$out/speeds.csv" "$out/speeds.svg"
  } >"$out/summary.txt" 2>&1
}
trap bundle EXIT

: >"$work/ends.txt"
build() {
  [ "${ENGINE_SESSION_TOY:-0}" != 1 ] || return
  {
    nvidia-smi
    nvcc --version | tail -2
    build_kernels "$python"
  } >"$out/build.txt" 2>&1 || echo "build FAILED, see build.txt" >>"$work/ends.txt"
  echo "built after $SECONDS s" >>"$work/ends.txt"
}
leave_out_models "$python"

ENGINE_SESSION_UNTIL=$(($(date +%s) + seconds - SECONDS - 14))
export ENGINE_SESSION_UNTIL
run() { # role
  local path=$work/plugin:$PYTHONPATH begun=$SECONDS role=$1
  case $role in stock | dflash | fp32_stock) path=$PYTHONPATH ;; esac
  # A timed-out role still leaves what it had written.
  PYTHONPATH=$path timeout -k 5 $((seconds - SECONDS - 12)) "$python" "$root/tests/gpu/engine_runs.py" \
    "$role" "$work/roles" "${roles[@]}" >"$work/roles/$role.txt" 2>&1
  echo "$role: exit $? after $((SECONDS - begun)) s" >>"$work/ends.txt"
  touch "$work/roles/$role.done"
}
start() { # roles
  for role in "$@"; do
    run "$role" &
    sleep 0.5 # SGLang picks free ports by trying
  done
}
stock=() ours=()
for role in "${roles[@]}"; do
  case $role in stock | dflash | fp32_stock) stock+=("$role") ;; *) ours+=("$role") ;; esac
done
start ${stock[@]+"${stock[@]}"} # they need no kernels of ours
build
start ${ours[@]+"${ours[@]}"}
(sleep $((seconds > 90 ? seconds - SECONDS - 50 : 40)); bundle) & # whoever cuts us off leaves this
early=$!
while [ -n "$(jobs -rp | grep -v "^$early$")" ]; do sleep 0.5; done
kill $early 2>/dev/null
