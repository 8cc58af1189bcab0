#!/usr/bin/env bash
# SGLang's and our CUDA modules for rank_slice_session.sh, built on a machine with nvcc and no GPU.
#
#   tests/gpu/slice_modules.sh OUT [CACHES.tar.xz]
#
# OUT/slice_modules.txz is to be carried; where the GPU is:
#   mkdir modules && tar xJf slice_modules.txz -C modules
#   SLICE_MODULES=modules tests/gpu/rank_slice_session.sh ...
# CACHES.tar.xz: of an earlier session on such a machine, with .triton/cache in it; Triton's kernels
# are compiled for the device at hand and cannot be built here. Takes about 10 minutes on two cores,
# 7 of them SGLang's Marlin kernels for experts; what is in OUT/modules is not built again.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "${1:?folder for the result}" && cd "$1" && pwd)
caches=${2:+$(realpath "$2")}
python=${PYTHON:-python3}
made=$out/modules
mkdir -p "$made"
cd "$out" # in the checkout `kernels` would hide another package
"$python" "$root/tests/gpu/slice_modules.py" build "$made"
TVM_FFI_CACHE_DIR=$made/tvm-ffi PYTHONPATH=$made/python \
  "$python" "$root/tests/gpu/slice_modules.py" check "$out/modules.json"
"$python" -c 'import json, sys
missing = json.load(open(sys.argv[1]))["missing"]
sys.exit("not built: " + ", ".join(missing) if missing else 0)' "$out/modules.json"
OVERSTORY_KERNEL_CACHE=$made/overstory "$python" -m overstory.kernels.build --arch sm_90 >"$out/kernels.txt"
if [ -n "$caches" ]; then
  mkdir -p "$made/triton"
  tar xf "$caches" -C "$made/triton" --strip-components=2 .triton/cache
fi
tar cJf "$out/slice_modules.txz" -C "$made" .
ls -l "$out/slice_modules.txz"
size=$(stat -c %s "$out/slice_modules.txz")
[ "$size" -lt 20000000 ] || { echo "more than 20 MB" >&2; exit 1; }
