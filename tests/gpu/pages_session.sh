#!/usr/bin/env bash
# DDTREE with pages of 1, 16 and 64 slots inside the real SGLang on one GPU.
#
#   tests/gpu/pages_session.sh OUT SECONDS [PAGE...]
#
# Needs what engine_session.sh needs. One process per page size; all start and say their texts side
# by side, then they are timed in turn. Into OUT: summary.txt, PAGE.json, logs.txt, build.txt.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
pages=("$@")
[ ${#pages[@]} -gt 0 ] || pages=(1 16 64)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
use_checkout "$root" kernels workers orchestrator
mkdir -p "$work/pages"
export PYTHONPATH=$work/plugin:$PYTHONPATH

bundle() {
  for page in "${pages[@]}"; do
    echo "======== $page"
    grep -v "Capturing batches" "$work/pages/$page.txt" 2>/dev/null | tail -c 40000
  done >"$out/logs.txt" 2>&1
  cp "$work"/pages/*.json "$out/" 2>/dev/null
  { cat "$work/ends.txt" && "$python" "$root/tests/gpu/page_compare.py" "$work/pages" "${pages[@]}"; } \
    >"$out/summary.txt" 2>&1
}
trap bundle EXIT

: >"$work/ends.txt"
if [ "${PAGES_DEVICE:-cuda}" = cuda ]; then
  export OVERSTORY_KERNELS=cuda
  { nvidia-smi; nvcc --version | tail -2; build_kernels "$python"; } >"$out/build.txt" 2>&1 ||
    echo "build FAILED, see build.txt" >>"$work/ends.txt"
  echo "built after $SECONDS s" >>"$work/ends.txt"
fi
leave_out_models "$python"
PAGES_SESSION_UNTIL=$(($(date +%s) + seconds - SECONDS - 12))
export PAGES_SESSION_UNTIL
run() { # page
  local begun=$SECONDS
  timeout -k 5 $((seconds - SECONDS - 8)) "$python" "$root/tests/gpu/page_engines.py" \
    "$1" "$work/pages" "${pages[@]}" >"$work/pages/$1.txt" 2>&1
  echo "page $1: exit $? after $((SECONDS - begun)) s" >>"$work/ends.txt"
  touch "$work/pages/$1.done"
}
for page in "${pages[@]}"; do
  run "$page" &
  sleep 0.5 # SGLang picks free ports by trying
done
wait
