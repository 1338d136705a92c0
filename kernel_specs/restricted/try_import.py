"""Import modules in a short-lived process: `python -I -B try_import.py REQUEST`.

REQUEST is JSON: `paths` for sys.path, `modules` to import, `limits` and `support` as in boot.json,
`tmp`. The last line of the output is JSON: each module with null, or with its error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ERROR_CHARS = 500


def main(request: str) -> int:
    """Import every module, and print the results; does not return."""
    folder = str(Path(__file__).resolve().parent.parent.parent)
    sys.path.insert(0, folder)
    from kernel_specs.restricted import config, confine
    from kernel_specs.restricted.policy.imports import before_sites, support

    sys.path.remove(folder)
    task = json.loads(request)
    boot = config.BootConfig(limits=config.ProcessLimits(**task["limits"]), tmp=task["tmp"])
    confine.apply_limits(boot.limits)
    os.environ.update(confine.environment(boot))
    support(task.get("support", []))
    sys.path[(place := before_sites(sys.path)) : place] = task["paths"]
    said = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    report = {name: _import(name) for name in task["modules"]}
    os.write(said, f"\n{json.dumps(report)}\n".encode())
    os._exit(0)  # skip exit handlers of packages


def _import(name: str) -> str | None:
    try:
        __import__(name)
    except BaseException as error:  # noqa: BLE001  # SystemExit and panics of extensions too
        return f"{type(error).__name__}: {error}".strip()[:ERROR_CHARS]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
