"""Stands in for uv: makes folders of the right shape and notes every call in `$FAKE_UV_LOG`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Answer `pip install` and `python find|install|list` as uv does."""
    args = [arg for arg in sys.argv[1:] if arg not in ("--color", "never")]
    with Path(os.environ["FAKE_UV_LOG"]).open("a") as log:
        log.write(json.dumps(args) + "\n")
    if args[0] == "--cache-dir":
        args = args[2:]
    if args[:2] == ["pip", "install"]:
        return _install(args)
    if args[:2] == ["python", "list"]:
        print("warning: a shim is broken", file=sys.stderr)
        print(json.dumps([{"version": "3.11.2", "path": "/usr/bin/python3.11"}]))
    else:
        return 2
    return 0


def _install(args: list[str]) -> int:
    root = Path(args[args.index("--prefix") + 1])
    if says := os.environ.get("FAKE_UV_SAYS"):
        print(says, flush=True)
    if block := os.environ.get("FAKE_UV_BLOCK"):
        Path(block, "reached").write_bytes(b"x")
        Path(block, "go").read_bytes()  # a fifo: until its writer closes it
    if name := os.environ.get("FAKE_UV_FILES"):
        (root / name).write_text("{}")
    if error := os.environ.get("FAKE_UV_ERROR"):
        print(error, file=sys.stderr)
        return 1
    wanted = args[args.index("--") + 1 :]
    unfit = [each for each in os.environ.get("FAKE_UV_UNFIT", "").split() if each in wanted]
    if unfit:
        said = f"Because {unfit[0]} was not found in the package registry and you require it"
        print(f"No solution found when resolving dependencies\n{said}", file=sys.stderr)
        return 1
    if os.environ.get("FAKE_UV_CONFLICT") and len(wanted) > 3:
        print("No solution found\nBecause a depends on b<1 and you require b>2", file=sys.stderr)
        return 1
    if "--dry-run" in args:
        return 0
    site = root / "lib/python{}.{}/site-packages".format(*sys.version_info)
    site.mkdir(parents=True)
    for requirement in wanted:
        name = requirement.partition(">")[0].replace("-", "_")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
    print(f"Resolved {len(args)} packages in 1ms\nInstalled them", file=sys.stderr)
    return 0


sys.exit(main())
