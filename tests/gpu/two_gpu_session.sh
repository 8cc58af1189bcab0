#!/usr/bin/env bash
# Two GPUs of one host: communicators and transfers; with SGLang on PYTHONPATH, engines on both; with
# Ray as well, deployments.
#
#   tests/gpu/two_gpu_session.sh OUT SECONDS [PART...]
#
# TWO_GPU_TOY=1 rehearses every part on a CPU.
# TWO_GPU_NEW: tokens of each answer of a deployment (2400; 800 until the ninth run).
# TWO_GPU_KIMI_LAST=0 leaves out the prefill of 65,536 tokens, which takes half of kimi.hand_off.
# SLICE_MODULES: as for rank_slice_session.sh. kimi.hand_off needs them; others then find there what
# they would compile, or put it there.
# Parts: comm, which runs by itself; comm.kv (its rates alone), engines.ROLE, deployed.CASE and
# kimi.hand_off (two_gpu_engines.py, two_gpu_deployed.py, two_gpu_kimi.py), which then run side by side,
# each with what is left of the time; kimi.hand_off and engines.hand_off_tp2 measure in turn. Needs
# python3 with torch and CuPy; for engines SGLang and nvcc, for deployments Ray. No install of this
# project.
# NVLink multicast is left off (NCCL_NVLS_ENABLE=0): on a shared host it can stop the other GPUs.
# Into OUT: summary.txt, comm.json, engines_*.json, deployed_*.json, kimi_*.json, logs.txt
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(comm engines.hand_off engines.tp2 engines.tp2_custom
  deployed.rolling_on deployed.rolling_off deployed.tp2_noset1 deployed.tp2_noset0 deployed.tp2_unset
  deployed.second_gpu_noset0)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
[ -z "${SLICE_MODULES:-}" ] || SLICE_MODULES=$(cd "$SLICE_MODULES" && pwd) || exit 2
use_checkout "$root" kernels workers orchestrator clusters
[ -z "${SLICE_MODULES:-}" ] || use_modules "$SLICE_MODULES"
export TWO_GPU_TURN=$work/turn # whose turn it is to measure: two_gpu_turn.py
kernels=cuda
[ "${TWO_GPU_TOY:-0}" != 1 ] || kernels=auto
export OVERSTORY_KERNELS=${OVERSTORY_KERNELS:-$kernels} PYTHONPATH=$work/plugin:$PYTHONPATH
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# Ray ends processes where memory runs short by what a machine shows, which some raise as it is used.
export RAY_memory_monitor_refresh_ms=0

say() { echo "[$SECONDS s] $*" | tee -a "$out/summary.txt"; }
: >"$out/summary.txt"
: >"$out/logs.txt"
{
  nvidia-smi -L
  nvidia-smi topo -m
  nproc
} >>"$out/summary.txt" 2>&1

run() { # part
  local part=$1 left=$((seconds - SECONDS - 4)) name=${1#*.} words
  case $part in
    comm) [ $left -le "${COMM_S:-75}" ] || left=${COMM_S:-75} ;;
  esac
  [ $left -gt 10 ] || { say "$part: no time left" && return; }
  words=("$name" "$out")
  [ "$part" != comm ] || words=("$out")
  timeout -k 2 $left "$python" "$root/tests/gpu/two_gpu_${part%%.*}.py" "${words[@]}" $((left - 3)) \
    >"$work/$part.txt" 2>&1
  say "$part: exit $?"
  { # one part at a time
    flock 9
    echo "======== $part"
    grep -v "Capturing batches" "$work/$part.txt" | tail -c 30000
  } >>"$out/logs.txt" 9>"$work/logs.lock"
  grep -E "^== " "$work/$part.txt" >>"$out/summary.txt"
}

if [ "${TWO_GPU_TOY:-0}" != 1 ]; then
  build_kernels "$python" >"$out/build.txt" 2>&1 &  # whoever needs them waits for the build
  leave_out_models "$python"
fi
for part in "${parts[@]}"; do
  [ "$part" != comm ] || run "$part" # by itself
done
for part in "${parts[@]}"; do
  [ "$part" = comm ] || run "$part" &
  sleep 0.5 # SGLang picks free ports by trying
done
wait
"$python" "$root/tests/gpu/two_gpu_engines.py" compare "$out" >>"$out/summary.txt" 2>&1
cat "$out/summary.txt"
