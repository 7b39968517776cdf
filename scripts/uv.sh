#!/usr/bin/env bash
# Print the path of uv in ${KVPILOT_CACHE:-~/.cache/kvpilot}. pip installs it by the hashes of uv.lock if it is missing.
set -euo pipefail
cd "$(dirname "$0")"
tools=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools
mkdir -p "$tools"
exec 9>"$tools/.uv.lock"
flock 9
if ! { [[ -x $tools/bin/uv ]] && cmp -s uv.lock "$tools/uv.lock"; }; then
  "$(./python.sh)" -m venv "$tools"
  "$tools/bin/pip" install -q --only-binary :all: --require-hashes --requirement uv.lock
  cp uv.lock "$tools/uv.lock"
fi
echo "$tools/bin/uv"
