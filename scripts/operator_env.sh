#!/usr/bin/env bash
# The operator alone, as its image has it: the wheel, and the extras `operator` and `tracing` by the hashes of docker/operator.lock.
#   scripts/operator_env.sh FOLDER      a virtual environment in FOLDER, the wheel in dist/
set -euo pipefail
folder=$(realpath -m "${1:?usage: scripts/operator_env.sh FOLDER}")
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$build/env"
"$build/env/bin/python" -m pip install -q --only-binary :all: --require-hashes --requirement docker/build.lock
"$build/env/bin/python" -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$build/dist" .
mkdir -p dist
cp "$build"/dist/*.whl dist/
"$python" -m venv --without-pip "$folder"
install() { "$build/env/bin/python" -m pip --python "$folder/bin/python" install -q --no-deps "$@"; }
install --only-binary :all: --require-hashes --requirement docker/operator.lock
install --no-index "$build"/dist/*.whl
"$build/env/bin/python" -m pip --python "$folder/bin/python" check
