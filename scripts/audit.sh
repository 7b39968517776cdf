#!/usr/bin/env bash
# Known vulnerabilities of what the operator's image holds: pip-audit over the part of requirements.lock that docker/operator.lock has.
# It asks the package index for them; a package that the index says nothing about is an error, not a pass.
#   scripts/audit.sh FOLDER [OPTION...]     of the virtual environment FOLDER (scripts/operator_env.sh); options of pip-audit
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/audit.sh FOLDER [OPTION...]}")
shift
tool=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/pip-audit-2.10.1

[[ -x $tool/bin/pip-audit ]] || { python3 -m venv "$tool" && "$tool/bin/pip" install -q pip-audit==2.10.1; }
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
"$folder/bin/python" - >"$pins" <<'PYTHON'
import importlib.metadata

for found in importlib.metadata.distributions():
    if found.name != "kvpilot":  # our own is on no index
        print(f"{found.name}=={found.version}")
PYTHON
"$tool/bin/pip-audit" --strict --no-deps --disable-pip --requirement "$pins" "$@"
