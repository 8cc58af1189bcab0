#!/usr/bin/env bash
# DDTREE inside the real SGLang on one GPU: what the engines say, and how fast.
#
#   tests/gpu/engine_session.sh OUT SECONDS [ROLE...]
#
# Needs python3 with torch and triton, nvcc, and SGLang on PYTHONPATH; no install of this project.
# One process per role (engine_runs.py); all start at once and say their texts side by side, then each
# is timed alone, in the order given. A role that fails does not stop the others. Into OUT:
#   summary.txt   how each ended, then what engine_compare.py says
#   results.json  all results
#   logs.txt      the end of every role's output; build.txt  machine and build
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
roles=("$@")
[ ${#roles[@]} -gt 0 ] ||
  roles=(ours stock dflash long_ours parts long_triton eager triton fp32_triton fp32_stock)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$work/links/overstory" "$work/plugin/overstory-0.1.0.dist-info" "$work/roles"
for part in kernels workers orchestrator; do ln -s "$root/$part" "$work/links/overstory/$part"; done
# What SGLang finds its plugins by, without an install.
printf 'Metadata-Version: 2.1\nName: overstory\nVersion: 0.1.0\n' \
  >"$work/plugin/overstory-0.1.0.dist-info/METADATA"
printf '[sglang.srt.plugins]\noverstory = overstory.workers.seam.plugin:register\n' \
  >"$work/plugin/overstory-0.1.0.dist-info/entry_points.txt"
export PATH=$PATH:/usr/local/cuda/bin
export PYTHONUNBUFFERED=1 OVERSTORY_KERNELS=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$work/links${PYTHONPATH:+:$PYTHONPATH}
cd "$work/links" || exit 1 # not the checkout: `kernels` there would hide another package

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
found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
result.write_text(json.dumps(found))
PY
  "$python" "$root/tests/gpu/engine_compare.py" "$work/roles" >>"$out/summary.txt" 2>&1
}
trap bundle EXIT

: >"$out/summary.txt"
{
  nvidia-smi
  nvcc --version | tail -2
  "$python" -m overstory.kernels.build --arch "sm_$(nvidia-smi --query-gpu=compute_cap \
    --format=csv,noheader --id=0 | tr -d .)"
} >"$out/build.txt" 2>&1 || echo "build FAILED, see build.txt" >>"$out/summary.txt"
echo "built after $SECONDS s" >>"$out/summary.txt"

run() { # role, roles that are timed before it
  local path=$work/plugin:$PYTHONPATH begun=$SECONDS role=$1
  shift
  case $role in stock | dflash | fp32_stock) path=$PYTHONPATH ;; esac
  # A timed-out role still leaves what it had written.
  PYTHONPATH=$path timeout -k 5 $((seconds - SECONDS - 12)) "$python" "$root/tests/gpu/engine_runs.py" \
    "$role" "$work/roles" "$@" >"$work/roles/$role.txt" 2>&1
  echo "$role: exit $? after $((SECONDS - begun)) s" >>"$out/summary.txt"
  touch "$work/roles/$role.done"
}
earlier=()
for role in "${roles[@]}"; do
  run "$role" ${earlier[@]+"${earlier[@]}"} &
  case $role in fp32*) ;; *) earlier+=("$role") ;; esac
  sleep 0.5 # SGLang picks free ports by trying
done
wait
