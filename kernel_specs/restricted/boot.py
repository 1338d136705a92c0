"""Entry point of a kernel: `python -I -B boot.py -f CONNECTION_FILE`.

This file is small, because Python compiles it at every start; other modules have cached bytecode.
"""

from __future__ import annotations

import sys
from pathlib import Path

EXIT_CODE = 70  # EX_SOFTWARE


def main(argv: list[str]) -> int:
    """Confine the process, then serve; return 0, or 70 if the kernel cannot start."""
    folder = str(Path(__file__).resolve().parent.parent.parent)
    sys.path.insert(0, folder)
    from kernel_specs.restricted import config, confine, host
    from kernel_specs.restricted.policy import imports

    sys.path.remove(folder)
    boot = config.BootConfig()
    try:
        connection_file = Path(argv[argv.index("-f") + 1]).absolute()
        boot = config.load(connection_file)
        confine.confine(boot)
        imports.support(boot.support)
        sys.argv = [""]  # the command line is the server's, not for user code
        kernel = host.KernelHost()
        kernel.preload()
        kernel.serve(boot, connection_file)
    except Exception as error:  # noqa: BLE001  # any error is reported to the host
        import traceback

        traceback.print_exc(file=sys.__stderr__)
        host.send_packet(
            boot.ready_fd, {"ready": False, "error": f"{type(error).__name__}: {error}"}
        )
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
