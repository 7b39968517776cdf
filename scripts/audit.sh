#!/usr/bin/env bash
# List known vulnerabilities in the packages of the operator's image, by pip-audit.
#   scripts/audit.sh FOLDER [OPTION...]     FOLDER: a virtual environment (scripts/operator_env.sh); OPTION: pip-audit's
# Exit with 1 if a vulnerability is known, and with 2 if a package could not be judged: pip-audit asks the index for a
# page of each version, which many mirrors do not have.
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/audit.sh FOLDER [OPTION...]}")
shift
cd "$(dirname "$0")"
tools=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/release-$(sha256sum <release.lock | head -c 12)
./locked.sh "$tools" release.lock

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$folder/bin/python" - >"$work/pins" <<'PYTHON'
import importlib.metadata

for found in importlib.metadata.distributions():
    if found.name != "kvpilot":  # no index has our own package
        print(f"{found.name}=={found.version}")
PYTHON
"$tools/bin/pip-audit" --no-deps --disable-pip --progress-spinner off --requirement "$work/pins" \
  --format json --output "$work/found" "$@" || true
"$tools/bin/python" - "$work/pins" "$work/found" <<'PYTHON'
import json
import pathlib
import sys

pins, found = map(pathlib.Path, sys.argv[1:])
asked = len(pins.read_text().split())
if not found.exists():
    sys.exit(print("audit: no package was judged; see the error above", file=sys.stderr) or 2)
packages = json.loads(found.read_text())["dependencies"]
judged = [one for one in packages if "vulns" in one]
for one in judged:
    for known in one["vulns"]:
        fixed = ", ".join(known["fix_versions"]) or "no version yet"
        print(f"audit: {one['name']} {one['version']}: {known['id']}, fixed in {fixed}", file=sys.stderr)
if any(one["vulns"] for one in judged):
    sys.exit(1)
for one in packages:
    if "skip_reason" in one:
        print(f"audit: {one['name']}: {one['skip_reason']}", file=sys.stderr)
if len(judged) < asked:
    words = f"audit: {asked - len(judged)} of {asked} packages could not be judged: ask an index that has a page of each version"
    print(f"{words}, or another service (--vulnerability-service osv)", file=sys.stderr)
    sys.exit(2)
print(f"audit: no vulnerability is known in {asked} packages", file=sys.stderr)
PYTHON
