#!/usr/bin/env bash
# Everything worth measuring on a GPU in a given time, the most telling first.
#
#   kernels/bench/gpu_session.sh OUT SECONDS [SGLANG_FOLDER...]
#
# Needs python3 with torch and pytest, and nvcc (or a cache of built kernels in
# $OVERSTORY_KERNEL_CACHE); no install of this project. Each part has a time limit and a file of its
# own in OUT, and a part that fails does not stop the others:
#   build.txt      the machine, the build, what ptxas says
#   tests_{attention,fp8_hazards,error,others}.txt   tests/gpu   } side by side, as none of
#   memcheck.txt, racecheck.txt    compute-sanitizer    } them measures a time
#   warm.txt                  compiling the baselines   }
#   bench.txt, bench/{results.csv,plot.svg,goals.md}   the shapes with goals, then the baselines
#   sweep.txt, sweep/results.csv                       our tunables
#   ncu.txt        counters of one launch
# summary.txt says how each ended.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:?folder for the results} seconds=${2:?seconds in all}
shift 2
mkdir -p "$out"
out=$(cd "$out" && pwd)
sglang=()
for folder in "$@"; do sglang+=(--sglang "$(cd "$folder" && pwd)"); done
python=${PYTHON:-python3}

links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/overstory"
ln -s "$root/kernels" "$links/overstory/kernels"
# nvcc, ncu and compute-sanitizer where the toolkit is installed but not on the PATH.
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OVERSTORY_KERNELS=cuda
export OVERSTORY_COMMIT=${OVERSTORY_COMMIT:-$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)}
cd "$links" || exit 1 # not the checkout: `kernels` there would hide another package

left() { echo $((seconds - SECONDS)); }

part() { # name, most seconds, command...
  local name=$1 most=$2 begun=$SECONDS code
  shift 2
  [ "$most" -le "$(left)" ] || most=$(left)
  if [ "$most" -lt 4 ]; then
    echo "$name: left out, no time" >>"$out/summary.txt"
    return 1
  fi
  # TERM first: Python then writes what it has.
  timeout -k 3 "$most" "$@" >>"$out/$name.txt" 2>&1
  code=$?
  case $code in
    0) echo "$name: done in $((SECONDS - begun)) s" ;;
    124 | 137) echo "$name: stopped after its $most s" ;;
    *) echo "$name: FAILED (exit code $code) after $((SECONDS - begun)) s" ;;
  esac >>"$out/summary.txt"
  return $code
}

: >"$out/summary.txt"

{
  nvidia-smi
  nvcc --version
} >"$out/build.txt" 2>&1
# Without torch, whose import takes seconds, where the driver says what the GPU is.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2>/dev/null | tr -d .)
arch=()
[[ ! $capability =~ ^[0-9]+$ ]] || arch=(--arch "sm_$capability")
part build $((seconds / 2)) "$python" -m overstory.kernels.build --report ${arch[@]+"${arch[@]}"}

# Correctness, all at once; whoever is not done by the end of its time is stopped. However long the
# build took, two fifths of the time are left for times.
most=$((seconds * 45 / 100))
room=$(($(left) - seconds * 2 / 5))
[ "$most" -le "$room" ] || most=$room
sanitize() { # tool
  # One allocation per tensor, or the tool would see torch's big blocks only.
  part "$1" "$most" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$python" "$root/tests/gpu/sanitizer_matrix.py"
}
run_tests() { # name, files
  local name=$1
  shift
  part "$name" "$most" env OVERSTORY_TEST_SECONDS=$((most - 6)) "$python" -m pytest "$@" \
    -c "$root/pyproject.toml" -q -p no:cacheprovider -m "not full" --durations=8 --maxfail=25
}
run_tests tests_attention "$root/tests/gpu/test_gpu_attention.py" &
run_tests tests_fp8_hazards "$root/tests/gpu/test_gpu_attention_fp8.py" \
  "$root/tests/gpu/test_gpu_attention_hazards.py" &
# Beside SGLang's Triton kernel of the first folder; skipped where there is none.
OVERSTORY_SGLANG=${sglang[1]:-} run_tests tests_error -rP \
  "$root/tests/gpu/test_gpu_attention_error.py" &
run_tests tests_others "$root/tests/gpu/test_gpu_graphs.py" "$root/tests/gpu/test_gpu_small_ops.py" \
  "$root/tests/gpu/test_gpu_no_wait.py" &
sanitize memcheck &
sanitize racecheck &
part warm "$most" "$python" -m overstory.kernels.bench --quick --warm \
  --only "sglang|naive" ${sglang[@]+"${sglang[@]}"} &
wait

# Times, one process after another: one that faults cannot take the others along.
measure() { # name, seconds, arguments
  local name=$1 most=$2
  shift 2
  [ "$most" -le $(($(left) - 2)) ] || most=$(($(left) - 2))
  part "$name" $((most + 2)) "$python" -m overstory.kernels.bench --budget-s $((most - 6)) "$@"
}
measure bench $((seconds / 4)) --quick --out "$out/bench" --only " ours$"
measure bench $((seconds / 6)) --quick --out "$out/bench" --add \
  --only "triton_extend|torch_copy" ${sglang[@]+"${sglang[@]}"}
measure sweep $((seconds / 6)) --sweep --quick --out "$out/sweep"
part ncu 25 ncu --clock-control none -k regex:attention -s 4 -c 1 \
  --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats \
  --section LaunchStats --section Occupancy --section SchedulerStats \
  "$python" -m overstory.kernels.bench.probe
measure bench "$(left)" --quick --out "$out/bench" --add \
  --only "naive|split_decode|shared_kv" ${sglang[@]+"${sglang[@]}"}

cat "$out/summary.txt"
