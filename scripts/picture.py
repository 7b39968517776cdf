"""Record what a command prints on a terminal, and draw recordings as SVG.

    .venv/bin/python scripts/picture.py record docs/images/rollback.ansi -- make demo PLAIN=1
    .venv/bin/python scripts/picture.py draw docs/images/rollback.ansi --from "Problem "    # `make generate` does it

A recording is the command line and everything that the command wrote to a terminal, colours included; the user's home
folder becomes ~. The picture, FILE.svg beside it, begins at the first line with a text. A command that fails leaves the
last recording as it is.
"""

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 118, 60
# A picture in a page may load no fonts, so the reader's own monospaced font replaces rich's.
TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def record(target: Path, command: list[str]) -> int:
    """Run `command` on a terminal of its own, write the recording to `target` if it succeeds, and return its status."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    try:
        process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=environment)
    except OSError as error:
        print(f"{command[0]} does not start: {error.strerror}; put it on PATH", file=sys.stderr)
        return 127
    os.close(writer)
    said = _read(reader)
    if status := process.wait():
        sys.stderr.buffer.write(said)
        print(f"{command[0]} ended with exit code {status}: nothing was written", file=sys.stderr)
        return status
    whole = f"$ {shlex.join(command)}\n".encode() + said.replace(b"\r\n", b"\n")
    target.write_bytes(whole.replace(str(Path.home()).encode(), b"~"))
    return 0


def _read(reader: int) -> bytes:
    """Return all output until the command ends. On Linux, the terminal then reports an error instead of an end."""
    said = bytearray()
    with contextlib.suppress(OSError):
        while piece := os.read(reader, 65536):
            said += piece
    os.close(reader)
    return bytes(said)


def draw(recording: str, start: str) -> str:
    """Return the picture of a recording, from the first line that contains `start`.

    Raises:
        ValueError: no line contains it.
    """
    command, *lines = recording.rstrip().splitlines()
    first = next((number for number, line in enumerate(lines) if start in line), None)
    if first is None:
        raise ValueError(f"--from {start!r}: no line of the recording has it; name a text that the command prints")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines[first:]:
        console.print(Text.from_ansi(line))
    return console.export_svg(title=command.removeprefix("$ "), theme=MONOKAI, code_format=TEMPLATE)


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run a command and write a recording")
    recording.add_argument("target", type=Path, metavar="FILE.ansi")
    recording.add_argument("command", nargs="+", metavar="COMMAND")
    drawing = actions.add_parser("draw", help="draw a recording")
    drawing.add_argument("recording", type=Path, metavar="FILE.ansi")
    drawing.add_argument(
        "--from", dest="start", default="", metavar="TEXT", help="leave out the lines before this text"
    )
    options = parser.parse_args()
    if options.action == "record":
        return record(options.target, options.command)
    try:
        picture = draw(options.recording.read_text(encoding="utf-8"), options.start)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.recording.with_suffix(".svg").write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
