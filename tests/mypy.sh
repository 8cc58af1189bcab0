#!/usr/bin/env bash
# mypy does not follow setuptools' editable finder: show it the import package as a folder of links.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
links=$root/.mypy_cache/links
mkdir -p "$links/overstory"
for folder in orchestrator workers kernels clusters; do
  ln -sfn "$root/$folder" "$links/overstory/$folder"
done
cd "$links"
exec "$root/${PYTHON:-.venv/bin/python}" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" overstory
