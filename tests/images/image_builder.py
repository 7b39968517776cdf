"""Images without a registry or a daemon: a Python base of Debian's packages, builds, and containers.

Everything lies below one folder. Containers share this machine's network, so each of their servers must listen on
127.0.0.1.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvpilot_localcluster.debian import Archive, run
from kvpilot_localcluster.toolbox.buildah import buildah, runc
from kvpilot_localcluster.toolbox.fetch import tools_folder

BASE = "localhost/python:debian"
# Dependencies of Python, and libstdc++, which every official Debian image has because apt needs it.
_PACKAGES = [
    *("base-files", "base-passwd", "bash", "ca-certificates", "coreutils", "dash", "debianutils", "findutils", "grep"),
    *("gzip", "libc-bin", "libstdc++6", "login", "passwd", "python3", "python3-pip", "python3-venv", "sed", "tar"),
]
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


class Builder:
    """Image store in `folder`, with buildah."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        """Run one buildah command, and return its output."""
        return run([str(buildah()), *self._store, *command], cwd=cwd)

    def make_base(self) -> None:
        """Commit BASE: Debian's Python 3.11 with venv and pip, unpacked from packages without their install scripts."""
        archive = Archive(self.folder / "apt", "bookworm")
        archive.update()
        archive.fetch(sorted({*archive.closure(_PACKAGES, ".*"), *_PACKAGES}))
        root = self.folder / "base"
        archive.unpack(root)
        for kind in ("passwd", "group"):
            shutil.copy(root / "usr/share/base-passwd" / f"{kind}.master", root / "etc" / kind)
        for documents in ("doc", "man", "locale", "info"):
            shutil.rmtree(root / "usr/share" / documents, ignore_errors=True)
        name = self("from", "scratch").strip()
        self("copy", "--quiet", name, str(root), "/")
        self("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", name)
        self("commit", "--quiet", "--rm", name, BASE)
        shutil.rmtree(root)

    def build(self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str]) -> None:
        """Build a Dockerfile with this machine's access to the package index, of which the image keeps no trace."""
        options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        options += [part for mount in self._index() for part in ("--volume", mount)]
        self(
            *(
                "build",
                "--quiet",
                "--network",
                "host",
                "--isolation",
                "oci",
                "--runtime",
                str(runc()),
                "--format",
                "oci",
            ),
            *(*options, "--file", str(dockerfile), "--tag", tag, str(context)),
        )

    def config(self, tag: str) -> Mapping[str, object]:
        """Return the image's configuration: User, Entrypoint, Env, Labels."""
        found: Mapping[str, object] = json.loads(self("inspect", "--type", "image", tag))["OCIv1"]["config"]
        return found

    def history(self, tag: str) -> str:
        """Return the image's history."""
        return json.dumps(json.loads(self("inspect", "--type", "image", tag))["OCIv1"]["history"])

    @contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """Mount the image's file system."""
        name = self("from", tag).strip()
        try:
            yield Path(self("mount", name).strip())
        finally:
            self("rm", name)

    def _index(self) -> Iterator[str]:
        """Yield mounts: this machine's pip settings, its certificate authorities and their folders."""
        listed = run([str(tools_folder() / "bin" / "pip"), "config", "list"])
        settings = dict(line.split(".", 1)[1].split("=", 1) for line in listed.splitlines() if "=" in line)
        settings = {name: value.strip("'") for name, value in settings.items()}
        text = "".join(f"{name} = {value}\n" for name, value in settings.items())
        file = self.folder / "pip.conf"
        file.write_text(f"[global]\n{text}")
        yield f"{file}:/etc/pip.conf:ro"
        if _AUTHORITIES.is_file():
            yield f"{_AUTHORITIES}:{_AUTHORITIES}:ro"
        # An index may link to files in the folder beside it, so mount that folder.
        folders = [Path(word) for word in settings.get("find-links", "").split()]
        folders += [
            Path(word.removeprefix("file://")).parent
            for word in settings.get("extra-index-url", "").split()
            if word.startswith("file://")
        ]
        for folder in folders:
            if folder.is_absolute() and folder.is_dir():
                yield f"{folder}:{folder}:ro"


def bytes_in(root: Path) -> int:
    """Return the size of the files below `root`, counting hard links once."""
    seen: dict[tuple[int, int], int] = {}
    for path in root.rglob("*"):
        found = path.lstat()
        seen[found.st_dev, found.st_ino] = found.st_size if not path.is_dir() else 0
    return sum(seen.values())


@contextmanager
def container(
    root: Path, folder: Path, config: Mapping[str, object], arguments: Sequence[str], mounts: Mapping[Path, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run the image's entry point as the image's user, without capabilities, on a read-only root.

    Args:
        root: the image's file system.
        folder: the folder for the OCI bundle, runc's state and output.log.
        config: the image's configuration.
        arguments: arguments of the entry point.
        mounts: files and folders of this machine, with their read-only mount points.
    """
    bundle = folder / "bundle"
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(_bundle(root, config, arguments, mounts)))
    runtime = [str(runc()), "--root", str(folder / "state")]
    name = f"kvpilot-{os.getpid()}"
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            [*runtime, "run", "--bundle", str(bundle), name], stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            subprocess.run([*runtime, "kill", name, "TERM"], check=False, capture_output=True)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            subprocess.run([*runtime, "delete", "--force", name], check=False, capture_output=True)


def _bundle(
    root: Path, config: Mapping[str, object], arguments: Sequence[str], mounts: Mapping[Path, str]
) -> dict[str, object]:
    user, group = (int(part) for part in str(config["User"]).split(":"))
    entry, env = config["Entrypoint"], config["Env"]
    assert isinstance(entry, list)
    assert isinstance(env, list)
    hidden = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},  # noqa: S108
    ]
    seen = [
        {"destination": to, "type": "bind", "source": str(here), "options": ["rbind", "ro"]}
        for here, to in mounts.items()
    ]
    return {
        "ociVersion": "1.0.0",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "user": {"uid": user, "gid": group},
            "args": [*entry, *arguments],
            "env": env,
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
        },
        "mounts": [*hidden, *seen],
        # Share the network, because the test's API server listens on this machine's loopback.
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]},
    }
