"""Plot files for commands with --plot. matplotlib is in the extra `cli`, which the images do not install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpilot_formats.untrusted import KvpilotError

SUFFIXES = (".svg", ".png")
# The white background suits viewers in dark mode. Without random ids, equal data give equal files.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvpilot",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class PlotError(KvpilotError):
    """Error for a plot that cannot be written. The message names the option, its value and the remedy."""


def check(file: Path) -> None:
    """Raise PlotError unless a plot can be written to the file."""
    if file.suffix.lower() not in SUFFIXES:
        raise PlotError(f"--plot {str(file)!r}: the suffix must be {' or '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise PlotError(f"--plot {str(file)!r}: its folder does not exist; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("--plot needs matplotlib, which is not installed; pip install 'kvpilot[cli]'") from None


@contextmanager
def drawing(file: Path, width: float, height: float) -> Iterator[Any]:
    """Yield axes of this size in inches, and write the figure when the block ends. Call `check` first."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(width, height))
        try:
            yield axes
            figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix.lower() == ".svg" else {})
        except OSError as error:
            raise PlotError(f"--plot {str(file)!r} cannot be written ({error}); choose another place") from error
        finally:
            plt.close(figure)
