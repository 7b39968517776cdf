#!/usr/bin/env bash
# Install the packages of a lock file into a virtual environment, by their hashes. Cached files need no index.
#   scripts/locked.sh FOLDER LOCK     FOLDER is made if it is missing
set -euo pipefail
folder=$(realpath -m "${1:?usage: scripts/locked.sh FOLDER LOCK}") lock=$(realpath "${2:?usage: scripts/locked.sh FOLDER LOCK}")
uv=$("$(dirname "$0")/uv.sh")
export UV_CACHE_DIR=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/uv UV_LINK_MODE=copy

[[ -x $folder/bin/python ]] || "$uv" venv -q -p "$(command -v python3.11 || command -v python3)" "$folder"
install() { "$uv" pip install -q -p "$folder/bin/python" --no-deps --no-build --require-hashes --requirement "$lock" "$@"; }
install --offline 2>/dev/null || install
