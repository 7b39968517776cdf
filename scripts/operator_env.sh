#!/usr/bin/env bash
# Install the operator as its image has it: the wheel, and the locked extra `operator`.
#   scripts/operator_env.sh FOLDER      makes a virtual environment in FOLDER, and the wheel in dist/
set -euo pipefail
folder=$(realpath -m "${1:?usage: scripts/operator_env.sh FOLDER}")
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

scripts/locked.sh "$build/env" docker/build.lock
"$build/env/bin/python" -m hatchling build -t wheel -d "$build/dist" >&2
mkdir -p dist
cp "$build"/dist/*.whl dist/
scripts/locked.sh "$folder" docker/operator.lock
uv=$(scripts/uv.sh)
"$uv" pip install -q -p "$folder/bin/python" --no-cache --no-index --no-deps "$build"/dist/*.whl
"$uv" pip check -q -p "$folder/bin/python"
