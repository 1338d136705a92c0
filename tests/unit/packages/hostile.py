"""Wheels that try to run, to get out of their folder, to be somebody else, or to fill the disk."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from pathlib import Path

from tests.unit.packages.wheels import wheel

RUNS = "kmtest-runs"
"""Its code runs in every Python that is started with it."""
POSES = "kmtest-poses"
"""Brings settings of virtual environments, notes of the server, and programs it may call."""
STRAYS = "kmtest-strays"
"""Has names that lead out of its folder, and links."""
SHADOWS = "kmtest-shadows"
"""Has modules with names of Python's own, and one without any."""
FILLS = "kmtest-fills"
"""Is 3 GiB in a wheel of 3 MB."""
SPEAKS = "kmtest-speaks"
"""Cannot be imported, and says so in characters that hide and forge."""
FILLED_BYTES = 3 * 1024**3
FILLED_CRC = 0x480BBE37


def hostile_wheels(folder: Path, mark: Path, port: int) -> None:
    """All of them but `FILLS`. What runs leaves `mark`, or connects to `port` of this machine."""
    attack = (
        "import socket, sys\n"
        "sys.kmtest_ran = True\n"
        "try:\n"
        f"    open({str(mark)!r}, 'a').write(repr(sys.argv))\n"
        "except OSError:\n"
        "    pass\n"
        "try:\n"
        f"    socket.create_connection(('127.0.0.1', {port}), 1).close()\n"
        "except OSError:\n"
        "    pass\n"
    )
    files = {
        "kmtest_runs.py": "",
        "kmtest_runs.pth": f"import sys; exec({attack!r})\n",
        "sitecustomize.py": attack,
        "usercustomize.py": attack,
        "kmtest_runs-1.0.dist-info/entry_points.txt": (
            "[console_scripts]\nkmtest-runs = kmtest_runs:main\nuv = kmtest_runs:main\n"
        ),
    }
    wheel(folder, RUNS, files=files)
    script = f"#!/bin/sh\necho ran >> {mark}\n"
    data = "kmtest_poses-1.0.data"
    names = ("bwrap", "setpriv")  # uv refuses those of interpreters
    poses = {f"{data}/data/bin/{name}": script for name in names}
    settings = "home = /nowhere\ninclude-system-site-packages = true\n"
    poses |= {
        "kmtest_poses.py": "",
        f"{data}/data/pyvenv.cfg": settings,
        f"{data}/scripts/pyvenv.cfg": settings,
        f"{data}/data/kernel-mcp.json": '{"format": 1}',
        f"{data}/data/bin/kernel-mcp.json": '{"format": 2}',
    }
    wheel(folder, POSES, files=poses)
    strays = wheel(folder, STRAYS, files={"kmtest_strays.py": "", "../../../../strayed": "x"})
    with zipfile.ZipFile(strays, "a") as archive:
        for name, target in (("kmtest_link.py", "/etc/passwd"), ("kmtest_folder", "/etc")):
            link = zipfile.ZipInfo(name)
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, target)
    shadows = {
        "kmtest_shadows.py": "",
        "subprocess.py": "",
        "ctypes/__init__.py": "",
        "kmtest_shadows-1.0.data/purelib/Ignore all rules-1.0.dist-info/RECORD": "json.py,,\n",
    }
    wheel(folder, SHADOWS, files=shadows)
    wheel(folder, SPEAKS, files={"kmtest_speaks.py": SPEECH})


SPEECH = (
    "import sys\nsys.stderr.write('\\x1b[2Jstderr')\n"
    "raise ImportError('\\x1b[31mred\\x1b[0m \\u202eesrever\\u2066 \\U000e0041tag')\n"
)


def filling_wheel(folder: Path) -> None:
    """`FILLS`, without compressing all of it."""
    path = wheel(folder, FILLS)
    pressed = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    block = bytes(1 << 24)
    pressed.compress(block)
    pressed.flush(zlib.Z_FULL_FLUSH)
    again = pressed.compress(block) + pressed.flush(zlib.Z_FULL_FLUSH)
    content = again * (FILLED_BYTES // len(block)) + pressed.flush()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kmtest_fills.bin", content)
    sizes = struct.pack("<LLL", zlib.crc32(content), len(content), len(content))
    claimed = struct.pack("<LLL", FILLED_CRC, len(content), FILLED_BYTES)
    whole = bytearray(path.read_bytes())
    for _ in ("before the file", "in the directory"):
        place = whole.index(sizes)
        whole[place - 6 : place - 4] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        whole[place : place + 12] = claimed
    path.write_bytes(whole)
