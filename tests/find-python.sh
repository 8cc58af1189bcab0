#!/usr/bin/env bash
# Prints a Python that the pins are for (3.11 or 3.12) and that can make virtual environments.
# `PYTHON=/path/to/python make env` chooses one by hand.
set -euo pipefail

good='import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'

candidates=(python3.11 python3.12 python3 python)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
seen=()
for candidate in "${candidates[@]}"; do
  # Every one on PATH: the first may be a version manager's shim that leads nowhere.
  while read -r path; do
    if "$path" -c "$good" >/dev/null 2>&1; then
      echo "$path"
      exit 0
    fi
    version=$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "does not run")
    seen+=("$path ($version)")
  done < <(type -ap "$candidate" 2>/dev/null | awk '!seen[$0]++')
done

{
  echo "No usable Python: wanted 3.11 or 3.12 with the venv and ensurepip modules."
  echo "Found: ${seen[*]:-none}."
  echo "On Debian or Ubuntu: apt install python3.11 python3.11-venv. Or: PYTHON=/path/to/python make env"
} >&2
exit 1
