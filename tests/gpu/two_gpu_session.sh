#!/usr/bin/env bash
# Two GPUs of one host: communicators and transfers; with SGLang on PYTHONPATH, engines on both.
#
#   tests/gpu/two_gpu_session.sh OUT SECONDS [comm|engines ...]
#
# Needs python3 with torch and CuPy; for `engines` SGLang and nvcc too. No install of this project.
# NVLink multicast is left off (NCCL_NVLS_ENABLE=0): on a shared host it can stop the other GPUs.
# Into OUT: summary.txt, comm.json, engines.json, logs.txt
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/gpu/without_install.sh"
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(comm engines)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
use_checkout "$root" kernels workers orchestrator
export OVERSTORY_KERNELS=cuda PYTHONPATH=$work/plugin:$PYTHONPATH
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

say() { echo "[$SECONDS s] $*" | tee -a "$out/summary.txt"; }
: >"$out/summary.txt"
{
  nvidia-smi -L
  nvidia-smi topo -m
} >>"$out/summary.txt" 2>&1
for part in "${parts[@]}"; do
  left=$((seconds - SECONDS - 3))
  [ $left -gt 10 ] || { say "$part: no time left" && continue; }
  if [ "$part" = engines ]; then
    build_kernels "$python" >>"$out/logs.txt" 2>&1 || say "kernels: build FAILED"
    left=$((seconds - SECONDS - 3))
  fi
  timeout -k 3 $left "$python" "$root/tests/gpu/two_gpu_$part.py" "$out" $((left - 5)) \
    >"$work/$part.txt" 2>&1
  say "$part: exit $?"
  grep -v "Capturing batches" "$work/$part.txt" | tail -c 30000 >>"$out/logs.txt"
  grep -E "^== " "$work/$part.txt" >>"$out/summary.txt"
done
cat "$out/summary.txt"
