#!/usr/bin/env bash
# Extends in blocks of rows, on one GPU: their tests, then prefill of one rank of Kimi-K2.6 by our
# kernel and by SGLang's Triton kernel in turn, whole prompts and rows behind long prefixes.
#
#   tests/gpu/prefill_session.sh OUT SECONDS [SGLANG_FOLDER]
#
# Needs what rank_slice_session.sh needs (SGLang on PYTHONPATH, SLICE_MODULES), and pytest. The tests
# run while SGLang loads; SGLANG_FOLDER (sglang's own) lets them compare with its Triton kernel too.
# 150 seconds leave out the longest prompt by Triton, 205 do not. Into OUT: tests.txt, and what
# rank_slice_session.sh writes: roles/prefill.json has `prefills` and `prefills_compared`.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:?folder for the results} seconds=${2:?seconds in all} folder=${3:-}
mkdir -p "$out"
[ -z "$folder" ] || folder=$(cd "$folder" && pwd)
(
  source "$root/tests/gpu/without_install.sh"
  out=$(cd "$out" && pwd)
  [ -z "${SLICE_MODULES:-}" ] || use_modules "$(cd "$SLICE_MODULES" && pwd)"
  use_checkout "$root" kernels
  OVERSTORY_KERNELS=cuda OVERSTORY_SGLANG=$folder timeout -k 3 45 "${PYTHON:-python3}" -m pytest -q -rP \
    -p no:cacheprovider -c "$root/pyproject.toml" -k blocks "$root/tests/gpu/test_gpu_attention_hazards.py" \
    "$root/tests/gpu/test_gpu_attention_error.py"
) >"$out/tests.txt" 2>&1 &
"$root/tests/gpu/rank_slice_session.sh" "$out" "$seconds" prefill
wait
tail -3 "$out/tests.txt"
