"""`staging FOLDER FDS COMMAND…`: run a command that sees detached mounts in a folder.

Only the command sees the mounts. `bare_program` starts this module before each sandbox with such
mounts, so it imports little.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NoReturn

from kernel_specs import linux


def main(argv: Sequence[str]) -> NoReturn:
    """Attach the mounts as 0, 1, … in the folder, in a new mount namespace, and run the command."""
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
