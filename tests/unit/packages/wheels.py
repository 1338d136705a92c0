"""Wheels, source distributions and requirements made on the spot."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement


def requirements(*texts: str) -> tuple[Requirement, ...]:
    """As they are admitted."""
    return tuple(map(Requirement, texts))


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, str] | None = None,
    requires: Iterable[str] = (),
) -> Path:
    """A pure wheel; by default one module of the package's name that knows its version."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    content = dict(files or {f"{module}.py": f"__version__ = {version!r}\n"})
    content[f"{info}/METADATA"] = "".join(
        [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {requirement}\n" for requirement in requires),
        ]
    )
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return file


def sdist(folder: Path, name: str, setup: str, version: str = "1.0") -> Path:
    """A source distribution whose `setup.py` is this code."""
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{name.replace('-', '_')}-{version}"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "setup.py": setup,
        f"{name.replace('-', '_')}.py": "built = True\n",
    }
    file = folder / f"{base}.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return file
