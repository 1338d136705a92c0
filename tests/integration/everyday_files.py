"""Everyday operations of programs on modes of files, as code for a cell."""

from __future__ import annotations

from tests.integration.bombs import QUIET

CODE = (
    QUIET
    + """
import os, pathlib, shutil, tarfile, tempfile, zipfile
source = pathlib.Path('source')
source.mkdir(mode=0o750)
(source / 'program').touch(0o700)
(source / 'program').chmod(0o755)
os.chmod('source/program', 0o754)
os.fchmod(os.open('source/program', os.O_RDONLY), 0o755)
shutil.copytree(source, 'copied')
shutil.copy('/usr/bin/env', 'env')
with tarfile.open('packed.tar', 'w') as packed:
    packed.add(source)
with tarfile.open('packed.tar') as packed:
    packed.extractall('unpacked')
with zipfile.ZipFile('packed.zip', 'w') as zipped:
    zipped.write('source/program')
with zipfile.ZipFile('packed.zip') as zipped:
    zipped.extractall('unzipped')
tempfile.TemporaryFile(dir='.').close()
os.chmod(tempfile.mkdtemp(dir='.'), 0o1777)
made = ('copied', 'unpacked/source', 'unzipped/source')
print(*sorted(os.path.exists(name + '/program') for name in made))
"""
)
PRINTED = "True True True\n"
