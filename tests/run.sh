#!/usr/bin/env bash
# Runs every kind of test that this machine can run, and says what it left out and why.
#   tests/run.sh sample   minutes: everything but the tests marked `full`
#   tests/run.sh full     everything; writes docs/test-results.md
set -uo pipefail
cd "$(dirname "$0")/.."
size=${1:?sample or full}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
markers=()
[ "$size" = full ] || markers=(-m "not full")
[ "$size" != full ] || export HYPOTHESIS_PROFILE=anew # other examples each time

why_not() { # kind -> why it cannot run here; empty if it can
  case $1 in
    kernels) command -v "${CXX:-g++}" >/dev/null || echo "no C++ compiler for the simulator" ;;
    gpu) nvidia-smi -L >/dev/null 2>&1 || echo "no NVIDIA GPU on this machine" ;;
  esac
}

# Hosts of the cluster tests are network namespaces that speak SSH (tests/cluster/hosts_lab.py); at full
# size one of them runs Prometheus. What is missing is installed where that starts no service: not
# under systemd.
install_for_hosts() {
  local packages
  packages=$(.venv/bin/python tests/cluster/hosts_lab.py)
  [ "$size" != full ] || command -v promtool >/dev/null || packages+=" prometheus"
  [ -n "$packages" ] && command -v apt-get >/dev/null && [ ! -d /run/systemd/system ] || return 0
  echo "installing for the tests over several hosts: $packages"
  # shellcheck disable=SC2086
  local limits=(-o Acquire::Retries=1 -o Acquire::http::Timeout=20)
  (timeout 120 apt-get "${limits[@]}" update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    timeout 300 apt-get "${limits[@]}" install -y -qq --no-install-recommends $packages) >"$results/apt.log" 2>&1 ||
    { tail -3 "$results/apt.log"; echo "not installed: those tests are skipped"; }
}

install_for_hosts
failed=0
summary=()
for kind in unit kernels engine cluster gpu; do
  reason=$(why_not "$kind")
  if [ -z "$(find "tests/$kind" -name 'test_*.py' 2>/dev/null | head -1)" ]; then
    reason="no tests of this kind yet"
  fi
  if [ -n "$reason" ]; then
    summary+=("$kind: skipped: $reason")
    continue
  fi
  echo "== $kind"
  begun=$SECONDS
  code=0
  parts=("tests/$kind")
  processes=()
  case $kind in
    # Two processes side by side; the tests of a file, which share what they have made, in one.
    unit | kernels) processes=(-n 2 --dist loadfile) ;;
    # A process, and so a Ray, for each file: what one leaves cannot reach the next.
    cluster) parts=(tests/cluster/test_*.py) ;;
  esac
  for part in "${parts[@]}"; do
    .venv/bin/pytest "$part" "${markers[@]}" "${processes[@]}" -q --durations=5 \
      --junit-xml="$results/$kind-$(basename "$part" .py).xml"
    ended=$?
    # 5: every test of the file is marked `full`.
    [ $ended -eq 0 ] || [ $ended -eq 5 ] || code=$ended
  done
  taken=$((SECONDS - begun))
  if [ $code -eq 0 ]; then
    summary+=("$kind: passed in $taken s")
  else
    summary+=("$kind: FAILED (pytest exit code $code) after $taken s")
    failed=1
  fi
done

[ "$size" != full ] || .venv/bin/python tests/report.py "$results" "${summary[@]}" >docs/test-results.md
echo "== summary ($size, ${SECONDS} s)"
printf '%s\n' "${summary[@]}"
[ "$size" = full ] || echo "left out: tests marked \`full\` (make test-full)"
exit $failed
