"""`staging FOLDER FDS COMMAND…`: a command that finds detached mounts in a folder, and it alone.

Started by `bare_program` before every sandbox that gets such mounts, so it imports little.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NoReturn

from kernel_specs.template import linux


def main(argv: Sequence[str]) -> NoReturn:
    """Put the mounts, named 0, 1, …, into the folder, in a namespace of the command's own."""
    folder, trees, *command = argv
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    for number, tree in enumerate(map(int, trees.split(","))):
        target = f"{folder}/{number}"
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)  # noqa: PTH102  # pathlib would take the start 10 ms
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        linux.move_mount(tree, target)
        os.close(tree)
    os.execv(command[0], command)
