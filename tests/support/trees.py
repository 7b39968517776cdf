"""Files of a folder, by their relative paths."""

from pathlib import Path


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, given by relative path, below a folder. Create the folders in between."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
