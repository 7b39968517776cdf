"""Fetch Debian packages into a private folder, without root rights and without changes to the machine's own apt.

The archive's address comes from the machine's apt sources. Only the suite differs.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpilot_localcluster.errors import BuildFailed, MissingTool

_SUITES = r"(?:bookworm|trixie|forky|sid|stable|testing|unstable)"
_TOOLS = {
    "apt-get": "apt",
    "dpkg": "dpkg",
    "dpkg-source": "dpkg-dev",
    "patch": "patch",
    "xz": "xz-utils",
    "tar": "tar",
    "openssl": "openssl",
}


def check_tools(tools: Iterable[str] = tuple(_TOOLS)) -> None:
    """Raise MissingTool if a tool is missing. The message names each one and its Debian package."""
    missing = [f"{tool} (package {_TOOLS[tool]})" for tool in tools if shutil.which(tool) is None]
    if missing:
        raise MissingTool(f"not on PATH: {', '.join(missing)}; install the packages with apt-get install")


def with_suite(sources: str, suite: str) -> str:
    """Return the Debian main archive of an apt sources file with another suite, in deb822 form.

    Leave out third-party, security and update archives. The result is empty if none remains.
    """
    return "\n".join(_deb822(sources, suite) or _one_line(sources, suite))


def _stanza(uri: str, suite: str, rest: Iterable[str] = ()) -> str:
    return "\n".join(["Types: deb deb-src", f"URIs: {uri}", f"Suites: {suite}", "Components: main", *rest, ""])


def _deb822(sources: str, suite: str) -> list[str]:
    found = []
    for text in re.split(r"\n\s*\n", sources):
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        fields = dict(re.findall(r"(?m)^(\S+):[ \t]*(.*)$", "\n".join(lines)))
        if re.search(rf"(?:^|\s){_SUITES}(?:\s|$)", fields.get("Suites", "")) and "URIs" in fields:
            signed = [f"Signed-By: {fields['Signed-By']}"] if fields.get("Signed-By") else []
            found.append(_stanza(fields["URIs"], suite, signed))
    return found


def _one_line(sources: str, suite: str) -> list[str]:
    found = []
    for line in re.findall(rf"(?m)^deb\s+(\[[^\]]*\]\s+)?(\S+)\s+{_SUITES}/?\s+[^\n]*\bmain\b", sources):
        signed = re.search(r"signed-by=([^\s\]]+)", line[0])
        found.append(_stanza(line[1], suite, [f"Signed-By: {signed[1]}"] if signed else []))
    return list(dict.fromkeys(found))


def machine_sources() -> str:
    """Return all of the machine's apt sources, as text."""
    etc = Path("/etc/apt")
    files = [
        etc / "sources.list",
        *sorted(etc.glob("sources.list.d/*.list")),
        *sorted(etc.glob("sources.list.d/*.sources")),
    ]
    return "\n\n".join(file.read_text() for file in files if file.is_file())


class Archive:
    """One suite of the Debian archive. Package lists and downloads are in a private folder."""

    def __init__(self, folder: Path, suite: str) -> None:
        self.folder = folder
        self.suite = suite

    def update(self) -> None:
        """Fetch the package lists.

        Raises:
            MissingTool: this machine's apt has no Debian archive in its sources.
            BuildFailed: the archive cannot be reached.
        """
        sources = with_suite(machine_sources(), self.suite)
        if not sources:
            raise MissingTool(
                "no Debian archive in /etc/apt/sources.list(.d): the control plane is built from Debian packages; "
                "use a Debian machine, or set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
            )
        for part in ("parts", "lists/partial", "cache/archives/partial", "debs"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "parts" / "debian.sources").write_text(sources)
        (self.folder / "status").touch()
        self._apt("-qq", "update")

    def files(self, packages: Sequence[str], *, source: str | None = None) -> list[str]:
        """Return the file names of binary packages and of one source package, with their versions."""
        listed = self._apt("download", "--print-uris", *packages)
        if source is not None:
            listed += self._apt("source", "--download-only", "--print-uris", source)
        return sorted(set(re.findall(r"(?m)^'[^']+' (\S+) ", listed)))

    def closure(self, packages: Sequence[str], pattern: str) -> list[str]:
        """Return those packages that apt would install on an empty system and whose names match `pattern`."""
        plan = self._apt("install", "--simulate", "--no-install-recommends", *packages)
        return sorted({name for name in re.findall(r"(?m)^Inst (\S+)", plan) if re.fullmatch(pattern, name)})

    def fetch(self, packages: Sequence[str], *, source: str | None = None) -> None:
        """Download packages into debs/, except those that are already there."""
        self._apt("-qq", "download", *packages)
        if source is not None:
            self._apt("-qq", "source", "--download-only", source)

    def unpack(self, root: Path) -> None:
        """Unpack every downloaded binary package below `root`."""
        root.mkdir(parents=True, exist_ok=True)
        for deb in sorted((self.folder / "debs").glob("*.deb")):
            run(["dpkg", "-x", str(deb), str(root)])

    def _apt(self, *args: str) -> str:
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": self.folder / "parts",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State": self.folder,
            "Dir::State::Lists": self.folder / "lists",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            # As root, apt downloads as another user by default, who may not write below a home folder.
            "APT::Sandbox::User": "root",
        }
        flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        return run(["apt-get", *flags, *args], cwd=self.folder / "debs")


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """Run a command and return its output.

    Raises:
        BuildFailed: it failed; the message holds the end of its output.
    """
    done = subprocess.run(list(command), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildFailed(f"{command[0]} {command[-1]} failed with {done.returncode}: {said}")
    return done.stdout
