#!/usr/bin/env bash
# Write a CycloneDX list of the operator's packages with versions, licences and dependencies.
#   scripts/sbom.sh FOLDER [FILE]       FOLDER: a virtual environment (scripts/operator_env.sh); FILE: dist/operator.cdx.json
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/sbom.sh FOLDER [FILE]}")
cd "$(dirname "$0")/.."
file=${2:-dist/operator.cdx.json}
tools=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/release-$(sha256sum <scripts/release.lock | head -c 12)
scripts/locked.sh "$tools" scripts/release.lock

mkdir -p "$(dirname "$file")"
"$tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
  --output-file "$file" "$folder/bin/python"
