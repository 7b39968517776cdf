#!/usr/bin/env bash
# A CycloneDX list of everything that the operator is made of: packages, versions, licences, what needs what.
#   scripts/sbom.sh FOLDER [FILE]       of the virtual environment FOLDER (scripts/operator_env.sh) into FILE (dist/operator.cdx.json)
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/sbom.sh FOLDER [FILE]}")
cd "$(dirname "$0")/.."
file=${2:-dist/operator.cdx.json}
tools=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/release-$(sha256sum <scripts/release.lock | head -c 12)
scripts/locked.sh "$tools" scripts/release.lock

mkdir -p "$(dirname "$file")"
"$tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
  --output-file "$file" "$folder/bin/python"
