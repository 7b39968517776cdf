"""Private certificate authority made with openssl, and kubeconfigs that use its certificates."""

import json
import shutil
import subprocess
from pathlib import Path

from kvpilot_localcluster.errors import MissingTool, StartFailed

_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def _openssl(folder: Path, *args: str) -> None:
    done = subprocess.run(["openssl", *args], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartFailed(f"openssl {' '.join(args)} failed with {done.returncode}: {done.stderr.strip()}")


def authority(folder: Path) -> None:
    """Create ca.crt and ca.key, and the key pair sa.key and sa.pub that signs service account tokens.

    Raises:
        MissingTool: openssl is not installed.
        StartFailed: openssl failed.
    """
    if shutil.which("openssl") is None:
        raise MissingTool("openssl is needed to make certificates and is not on PATH; install the package openssl")
    _openssl(
        folder,
        "req",
        "-x509",
        *_CURVE,
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-days",
        "365",
        "-subj",
        "/CN=kvpilot-ca",
    )
    _openssl(folder, "genrsa", "-out", "sa.key", "2048")
    _openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def certificate(folder: Path, name: str, subject: str, names: str = "") -> None:
    """Create NAME.crt and NAME.key, signed by the authority, for a server or a client.

    Args:
        folder: the authority's folder.
        name: the file name without its ending.
        subject: an X.509 subject, e.g. "/O=system:masters/CN=admin".
        names: subject alternative names as openssl writes them, e.g. "IP:127.0.0.1,DNS:localhost".
    """
    request, extensions = f"{name}.csr", f"{name}.ext"
    _openssl(folder, "req", *_CURVE, "-keyout", f"{name}.key", "-out", request, "-subj", subject)
    alternative = f"subjectAltName={names}\n" if names else ""
    (folder / extensions).write_text(f"{alternative}extendedKeyUsage=serverAuth,clientAuth\n")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "365", "-extfile", extensions]
    _openssl(folder, "x509", "-req", "-in", request, *signing, "-out", f"{name}.crt")
    (folder / request).unlink()
    (folder / extensions).unlink()


def kubeconfig(folder: Path, name: str, server: str) -> Path:
    """Write NAME.kubeconfig for the client certificate NAME, and return its path. The file is JSON, thus valid YAML."""
    path = folder / f"{name}.kubeconfig"
    cluster = {"server": server, "certificate-authority": str(folder / "ca.crt")}
    user = {"client-certificate": str(folder / f"{name}.crt"), "client-key": str(folder / f"{name}.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "kvpilot-local",
        "clusters": [{"name": "kvpilot-local", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "kvpilot-local", "context": {"cluster": "kvpilot-local", "user": name}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))
    return path
