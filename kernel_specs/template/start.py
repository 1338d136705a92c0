"""Entry point of a template's processes: `python -I -B start.py enter|init|zygote ARGUMENT…`.

The first ARGUMENT of `zygote` is the folder of the kernel's own packages and its place on sys.path,
empty if the environment has them.
Like boot.py it is small, because Python compiles it at every start.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    """Run the role that the first argument names; return its exit code."""
    folder = os.path.realpath(f"{__file__}/../../..")  # importing pathlib costs 4 ms
    sys.path.insert(0, folder)
    if argv[0] == "enter":
        from kernel_specs.template import enter

        run = enter.main
    elif argv[0] == "init":
        from kernel_specs.template import init

        run = init.main
    else:
        from kernel_specs.restricted.policy import imports

        imports.support(argv[1].rsplit(":", 1) if argv[1] else [])
        from kernel_specs.template import zygote

        run = zygote.main
    sys.path.remove(folder)
    return run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
