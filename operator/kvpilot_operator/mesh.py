"""The operator's identity in a service mesh, read from files that the mesh's agent writes and renews."""

import logging
import ssl
from pathlib import Path

from kvpilot_operator.errors import NoIdentity

log = logging.getLogger(__name__)

CHAIN, KEY, ROOT = "cert-chain.pem", "key.pem", "root-cert.pem"
"""File names that Istio's agent uses (OUTPUT_CERTS)."""

# ALPN protocol names to offer. By the first two, a sidecar that also accepts plain traffic recognises mutual TLS. The
# last one is the protocol inside TLS.
_PROTOCOLS = ["istio-http/1.1", "istio", "http/1.1"]


class Identity:
    """The operator's certificate and key, and the CA that signs engines' certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[int, int] | None] = []
        self._tls: ssl.SSLContext | None = None
        self._fault = ""

    def tls(self) -> ssl.SSLContext:
        """Return a TLS context from the newest files that match. Raise NoIdentity if no files have ever matched."""
        seen = [_stamp(self._folder / name) for name in (CHAIN, KEY, ROOT)]
        if seen != self._seen:
            self._seen = seen
            try:
                self._tls = _context(self._folder)
                log.info("read the mesh's certificates in %s", self._folder)
            except (OSError, ValueError) as error:
                # During a renewal the files may not match, so keep the last context. The error quotes no file content.
                self._fault = f"{self._folder}: {type(error).__name__}: {error}"
                if self._tls is not None:
                    log.warning("new certificates of the mesh cannot be used, the old ones stay: %s", self._fault)
        if self._tls is None:
            raise NoIdentity(f"{self._fault}; {CHAIN}, {KEY} and {ROOT} come from the mesh's agent: does it run?")
        return self._tls


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _context(folder: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Check no host name, because a workload's certificate names its service account, not a host or an address.
    tls.check_hostname = False
    tls.load_verify_locations(folder / ROOT)
    tls.load_cert_chain(folder / CHAIN, folder / KEY)
    tls.set_alpn_protocols(_PROTOCOLS)
    return tls
