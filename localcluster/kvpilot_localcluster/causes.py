"""Find the cause of a failed download or build in its log, and name the remedy.

Print the cause of the failure at the end of LOG, or fail if FOLDER's disk has less than 5 GB free:

    python -m kvpilot_localcluster.causes LOG
    python -m kvpilot_localcluster.causes --room 5 FOLDER
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kvpilot_localcluster.cache import cache_folder

PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_PROXY = re.compile(r"proxy", re.IGNORECASE)
# Map messages in logs that name no remedy to the remedy.
_KNOWN = {
    "No matching distribution found for torch": "pip finds no CPU build of torch: add the index of PyTorch's CPU "
    "builds to pip's configuration (extra-index-url)",
    "ensurepip is not available": "Python's venv is missing: install the package python3.11-venv or python3-venv",
}
_OFFLINE = re.compile(
    r"Temporary failure (in name resolution|resolving)|Name or service not known|Network is unreachable|dns error"
    r"|Could not (resolve|connect)|Failed to (establish a new connection|fetch|connect)|Connection (refused|timed out)"
    r"|Connection reset|operation timed out|tcp connect error",
    re.IGNORECASE,
)


def cause(log: str, variables: Mapping[str, str] | None = None) -> str:
    """Return the cause of the failure at the end of a log, with its remedy. Leave out passwords of proxies."""
    given = os.environ if variables is None else variables
    end = log[-20_000:]
    if _FULL.search(end):
        return f"the disk is full: free some GB at {cache_folder()}, or set KVPILOT_CACHE to a folder with more room"
    if _OFFLINE.search(end) or ("error" in end.lower() and _PROXY.search(end)):
        named = next(((name, given[name]) for name in PROXIES if given.get(name)), None)
        if named is not None:
            return f"nothing could be fetched through {named[0]}={without_password(named[1])}: correct it, or unset it"
        return "nothing could be fetched: check the network; behind a proxy, set HTTPS_PROXY and HTTP_PROXY"
    for said, remedy in _KNOWN.items():
        if said in end:
            return remedy
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "the command printed nothing"


def no_room(folder: Path, gigabytes: float) -> str:
    """Return a message if the folder's disk has less than `gigabytes` of free space, else the empty string."""
    there = next(one for one in [folder, *folder.absolute().parents] if one.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free >= gigabytes:
        return ""
    return (
        f"{folder} has {free:.1f} GB free, and {gigabytes:.0f} GB are needed: free space, or set KVPILOT_CACHE to a "
        "folder with more room"
    )


def without_password(address: str) -> str:
    """Return an address without its user and password."""
    return re.sub(r"(^|//)[^/@]*@", r"\1***@", address)


def main(arguments: list[str]) -> int:
    """Print the cause. With `--room`, return 1 if the disk has too little space."""
    if arguments[0] != "--room":
        print(cause(Path(arguments[0]).read_text(errors="replace")))
        return 0
    print(found := no_room(Path(arguments[2]), float(arguments[1])))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
