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
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(comm engines)
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$work/links/overstory" "$work/plugin/overstory-0.1.0.dist-info"
for part in kernels workers orchestrator; do ln -s "$root/$part" "$work/links/overstory/$part"; done
# What SGLang finds its plugins by, without an install.
printf 'Metadata-Version: 2.1\nName: overstory\nVersion: 0.1.0\n' \
  >"$work/plugin/overstory-0.1.0.dist-info/METADATA"
printf '[sglang.srt.plugins]\noverstory = overstory.workers.seam.plugin:register\n' \
  >"$work/plugin/overstory-0.1.0.dist-info/entry_points.txt"
export PATH=$PATH:/usr/local/cuda/bin
export PYTHONUNBUFFERED=1 OVERSTORY_KERNELS=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$work/plugin:$work/links${PYTHONPATH:+:$PYTHONPATH}
cd "$work/links" || exit 1 # not the checkout: `kernels` there would hide another package

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
    "$python" -m overstory.kernels.build --arch "sm_$(nvidia-smi --query-gpu=compute_cap \
      --format=csv,noheader --id=0 | tr -d .)" >>"$out/logs.txt" 2>&1 || say "kernels: build FAILED"
    left=$((seconds - SECONDS - 3))
  fi
  timeout -k 3 $left "$python" "$root/tests/gpu/two_gpu_$part.py" "$out" $((left - 5)) \
    >"$work/$part.txt" 2>&1
  say "$part: exit $?"
  grep -v "Capturing batches" "$work/$part.txt" | tail -c 30000 >>"$out/logs.txt"
  grep -E "^== " "$work/$part.txt" >>"$out/summary.txt"
done
cat "$out/summary.txt"
