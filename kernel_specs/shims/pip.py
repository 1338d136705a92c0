"""Replacement of pip in processes of a session: lists packages, installs none.

Found through PYTHONPATH by `python -m pip`, which the programs in `bin` start.
"""

from __future__ import annotations

import sys

ADVICE = (
    "Running code cannot add or remove packages: write `%pip install ...` as a line of its own, "
    "not indented, in a cell, or call the tool `install` with names where the server has it."
)
PYTHON = ".".join(map(str, sys.version_info[:2]))
FIELDS = ("Name", "Version", "Summary", "Home-page", "Author", "License")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line of pip or `uv pip`; return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in given if not word.startswith("-")]
    command, names = (words[0], words[1:]) if words else ("", [])
    if not command and {"--version", "-V"} & set(given):
        print(f"no pip, but what lists packages in its place (python {PYTHON})")
        return 0
    if command in ("list", "freeze"):
        for name, version in _installed():
            print(f"{name}=={version}" if command == "freeze" else f"{name:<27} {version}")
        return 0
    if command == "show" and names:
        return max(map(_show, names))
    print(ADVICE, file=sys.stderr)
    return 1


def _installed() -> list[tuple[str, str]]:
    from importlib import metadata  # costs 5 ms, which importers of ADVICE alone save

    found: dict[str, tuple[str, str]] = {}
    for each in metadata.distributions():  # the first one on sys.path is the one that is imported
        name = each.metadata["Name"]
        found.setdefault(name.lower(), (name, each.version))
    return [found[name] for name in sorted(found)]


def _show(name: str) -> int:
    from importlib import metadata

    try:
        found = dict(metadata.metadata(name).items())  # type: ignore[attr-defined]
    except metadata.PackageNotFoundError:
        print(f"WARNING: Package(s) not found: {name}", file=sys.stderr)
        return 1
    for field in FIELDS:
        print(f"{field}: {found.get(field, '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
