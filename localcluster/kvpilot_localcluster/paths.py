"""Convert paths of a container to paths of this machine. This module does no I/O.

A container here has no file system of its own, so paths in its command, arguments and environment are rewritten. A path
below a mount point, or below a folder of the image, becomes the path of the real folder.
"""

import re
from collections.abc import Mapping

# A path begins at the start of the text, or after a separator of shells, lists, options or file URLs.
_BEFORE = r"(?:(?<=^)|(?<=[\s=:,;\"'()\[\]{}<>@|&])|(?<=file://))"
_AFTER = r"(?=$|[/\s:,;\"'()\[\]{}<>|&])"


def rewrite(text: str, folders: Mapping[str, str]) -> str:
    """Replace container paths at the start of paths in `text` by machine paths.

    `folders` maps container paths to machine paths. A container path matches only whole file names.
    """
    if not folders:
        return text
    longest_first = sorted(folders, key=len, reverse=True)
    pattern = f"{_BEFORE}({'|'.join(re.escape(path) for path in longest_first)}){_AFTER}"
    return re.sub(pattern, lambda found: folders[found[1]], text)
