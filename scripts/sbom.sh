#!/usr/bin/env bash
# A CycloneDX list of everything that the operator is made of: packages, versions, licences, what needs what.
#   scripts/sbom.sh FOLDER [FILE]       of the virtual environment FOLDER (scripts/operator_env.sh) into FILE (dist/operator.cdx.json)
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/sbom.sh FOLDER [FILE]}")
cd "$(dirname "$0")/.."
file=${2:-dist/operator.cdx.json}
tool=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/cyclonedx-bom-7.5.0

[[ -x $tool/bin/cyclonedx-py ]] || { python3 -m venv "$tool" && "$tool/bin/pip" install -q cyclonedx-bom==7.5.0; }
mkdir -p "$(dirname "$file")"
"$tool/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
  --output-file "$file" "$folder/bin/python"
