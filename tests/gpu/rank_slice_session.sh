#!/usr/bin/env bash
# One rank of Kimi-K2.6 at TP 8 on one GPU: decode steps by stage, ways to run experts, a long prompt.
#
#   tests/gpu/rank_slice_session.sh OUT SECONDS [ROLE[=SECONDS]...]
#
# Needs python3 with torch and triton, nvcc, and SGLang on PYTHONPATH; no install of this project.
# SLICE_MODULES: the folder that slice_modules.sh built; without it SGLang compiles for minutes, and
# roles that would wait for that are left out, with the reason, after some seconds.
#
# Roles (rank_slice.py) load SGLang side by side and then run one after the other; each but the first
# has its own seconds kept for it, the first what they leave. Small ones (moe_*, few*, triton, long)
# are all built before any of them is measured. `slice_old_draft` (the drafter on SGLang's attention)
# and `slice_triton` (the experts on Triton as well) run only if those before measured nothing.
# Without roles: what was missing, in the order of its worth, for 250 seconds.
#
# A session that was cut goes on where it was: give it the same OUT. Into OUT, while it runs:
#   roles/            results of each role, after each point, and the launches profiled
#   summary.txt       how each role ended, and the points in short
#   slice.json        results of all roles; logs.txt: the end of every role's output
#   build.txt         machine and build; modules.json: which of SGLang's modules were not there
#   clocks.csv        each GPU's clocks, power and temperature every 2 s: runs of one machine differ
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
given=("$@")
[ ${#given[@]} -gt 0 ] || given=(moe_marlin moe_triton=11 moe_fused=11 triton=24 long=36 again=74)
roles=("${given[@]%%=*}")
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
[ -z "${SLICE_MODULES:-}" ] || SLICE_MODULES=$(cd "$SLICE_MODULES" && pwd) || exit 2
use_checkout "$root" kernels workers orchestrator
mkdir -p "$out/roles"
rm -f "$out"/roles/*.{done,built} # of a run before
export OVERSTORY_KERNELS=${OVERSTORY_KERNELS:-cuda} PYTHONPATH=$work/plugin:$PYTHONPATH
[ -z "${SLICE_MODULES:-}" ] || use_modules "$SLICE_MODULES"

bundle() {
  {
    for role in "${roles[@]}"; do
      echo "======== $role"
      grep -v "Capturing batches" "$out/roles/$role.txt" 2>/dev/null | tail -c 40000
    done
  } >"$out/logs.txt" 2>&1
  "$python" - "$out/roles" "$out/slice.json" <<'PY'
import json, pathlib, sys
folder, result = map(pathlib.Path, sys.argv[1:])
found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
result.write_text(json.dumps(found))
for name, role in found.items():
    print(name, "points", len(role.get("points", [])), "start_s", role.get("start_s"), "errors", list(role["errors"]))
    for point in role.get("points", []):
        print(" ", {k: v for k, v in point.items() if k != "stages_us"}, point.get("stages_us"))
    for row in role.get("auto", []):
        print(" ", "auto", {k: row[k] for k in ("drafter", "batch", "context", "best", "of_best", "used")})
    for kept in ("parts", "experts", "alike", "prefills"):
        if role.get(kept):
            print(" ", kept, len(role[kept]))
    for kept in ("left_out", "compiled"):
        if role.get(kept):
            print(" ", kept, role[kept])
PY
  ls "${TVM_FFI_CACHE_DIR:-$HOME/.cache/tvm-ffi}" >"$out/kernels_built.txt" 2>/dev/null
}
clocks=
trap 'kill $clocks 2>/dev/null; bundle >>"$out/summary.txt" 2>&1' EXIT

echo "======== $(date -u +%FT%TZ) ${given[*]}" >>"$out/summary.txt"
build() { # the kernels, while the roles load SGLang; `kernels` is done before any engine starts
  {
    nvidia-smi
    nvcc --version | tail -2
    build_kernels "$python"
  } >"$out/build.txt" 2>&1 || echo "build FAILED, see build.txt" >>"$out/summary.txt"
  echo "built after $SECONDS s" >>"$out/summary.txt"
  touch "$out/roles/kernels.done"
}
build &
jobs=($!)
nvidia-smi --query-gpu=timestamp,index,clocks.sm,clocks.mem,power.draw,temperature.gpu \
  --format=csv,noheader -l 2 >"$out/clocks.csv" 2>&1 &
clocks=$!
check_modules() { # seconds; a module that is there but does not load must not take more
  timeout -k 5 90 "$python" "$root/tests/gpu/slice_modules.py" check "$out/modules.json" \
    >"$out/modules.txt" 2>&1 || echo "modules not checked, see modules.txt" >>"$out/summary.txt"
  "$python" - "$out/modules.json" >>"$out/summary.txt" 2>&1 <<'PY'
import json, sys
missing = json.load(open(sys.argv[1]))["missing"]
print(len(missing), "of SGLang's modules are not there", *missing.items(), sep="\n  ")
PY
  echo "modules checked after $SECONDS s" >>"$out/summary.txt"
  touch "$out/roles/modules.done"
}
rm -f "$out/modules.json"
check_modules &
jobs+=($!)
run() { # role, seconds from now, roles that run before it
  local role=$1 given=$2 begun=$SECONDS
  shift 2
  # A timed-out role still leaves what it had written, and the others their time.
  local most=$((given + 10)) left=$((seconds - SECONDS - 6))
  timeout -k 5 $((most < left ? most : left)) "$python" "$root/tests/gpu/rank_slice.py" \
    "$role" "$out/roles" "$given" "$@" >"$out/roles/$role.txt" 2>&1
  echo "$role: exit $? after $((SECONDS - begun)) s" >>"$out/summary.txt"
  touch "$out/roles/$role.done"
}
early=()
for role in "${roles[@]}"; do
  case $role in moe_* | few* | triton | long) early+=("$role") ;; esac
done
RANK_SLICE_BUILT=$(IFS=,; echo "${early[*]}") # nobody is measured before these are built
export RANK_SLICE_BUILT
earlier=(kernels modules)
for ((number = 0; number < ${#roles[@]}; number++)); do
  role=${roles[number]} after=0
  for other in "${given[@]:number+1}"; do # each ends before the time of those after it begins
    case $other in *=*) after=$((after + ${other#*=})) ;; esac
  done
  run "$role" $((seconds - SECONDS - 8 - after)) "${earlier[@]}" &
  jobs+=($!)
  earlier+=("$role")
  sleep 0.5 # SGLang picks free ports by trying
done
wait "${jobs[@]}"
