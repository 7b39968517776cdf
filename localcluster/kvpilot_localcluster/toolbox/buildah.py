"""buildah and runc, which build and start images without a daemon, in private folders."""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import debian, tool

_VERSION = "1.28"
_LIBRARIES = ["libgpgme11", "libassuan0", "libgpg-error0", "libdevmapper1.02.1", "libudev1", "libseccomp2"]
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'


def buildah() -> Path:
    """Return buildah on PATH, else Debian's 1.28 with its own settings."""
    return tool("buildah", _VERSION, partial(_unpack, "buildah", [*_LIBRARIES, "libsubid4"]))


def runc() -> Path:
    """Return the path of runc: from PATH, else Debian's 1.1 from the cache."""
    return tool("runc", "1.1", partial(_unpack, "runc", ["libseccomp2"]))


def _unpack(program: str, libraries: list[str], folder: Path) -> None:
    """Unpack Debian's package, with libraries that a minimal machine may lack.

    A wrapper script makes only this program use these libraries.
    """
    root = folder / "root"
    debian([program, *libraries], root)
    settings = folder / "home" / ".config" / "containers"
    settings.mkdir(parents=True)
    (settings / "policy.json").write_text(_POLICY)
    (settings / "registries.conf").write_text("")
    (binary,) = (path for path in root.glob(f"usr/*bin/{program}") if not path.is_symlink())
    script = folder / "bin" / program
    script.parent.mkdir()
    found = ":".join(str(place) for part in ("usr/lib", "lib") for place in (root / part).glob("*-linux-gnu"))
    script.write_text(
        f'#!/bin/sh\nHOME="{folder / "home"}" LD_LIBRARY_PATH="{found}" '
        f'CONTAINERS_REGISTRIES_CONF="{settings / "registries.conf"}" exec "{binary}" "$@"\n'
    )
    script.chmod(0o755)
