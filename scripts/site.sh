#!/usr/bin/env bash
# Make the documentation a site. Its packages (site.lock) have an environment of their own in the cache.
#   scripts/site.sh build                      dist/site; a warning, such as a dead link or anchor, is an error
#   scripts/site.sh serve [OPTION]...          http://127.0.0.1:8000/, built again after each change (-a HOST:PORT)
#   scripts/site.sh check                      build, and read it in a browser: chromium on PATH, or $CHROMIUM
#   scripts/site.sh publish VERSION [ALIAS]    commit and push it to the branch gh-pages, beside other versions
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "site: $1" >&2; exit 1; }

case ${1:-} in
  build | serve | check) ;;
  publish) [[ -n ${2:-} ]] || fail "publish needs a version: scripts/site.sh publish main" ;;
  *) fail "no action '${1:-}': use build, serve, check or publish" ;;
esac
browser=${CHROMIUM:-$(command -v chromium || command -v google-chrome || true)}
[[ ${1:-} != check || -x $browser ]] ||
  fail "no browser${browser:+ at $browser}: install chromium (apt-get install chromium), or set CHROMIUM to the path of one"

tools=${KVPILOT_CACHE:-$HOME/.cache/kvpilot}/tools/site-$(sha256sum <scripts/site.lock | head -c 12)
[[ -f $tools/done ]] || { scripts/locked.sh "$tools" scripts/site.lock && touch "$tools/done"; }
# mike runs mkdocs by its name. Without the variable, Material announces its successor at every start.
export PATH=$tools/bin:$PATH NO_MKDOCS_2_WARNING=1

case $1 in
  build) exec mkdocs build --quiet ;;
  serve) exec mkdocs serve --no-strict "${@:2}" ;;
  check)
    mkdocs build --quiet
    exec python scripts/site_check.py dist/site "$browser"
    ;;
  publish)
    # The first version has no branch to add to.
    git fetch --quiet origin gh-pages:gh-pages 2>/dev/null || true
    mike deploy --push --update-aliases "${@:2}"
    # The address without a version leads to the last release, or to the only version before the first one.
    if mike list latest >/dev/null 2>&1; then default=latest; else default=$2; fi
    mike set-default --push "$default"
    ;;
esac
