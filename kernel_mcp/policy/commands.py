"""What a restrictive policy says about IPython commands."""

from __future__ import annotations

from kernel_mcp.policy.diagnostics import Diagnostic
from kernel_mcp.policy.magics import Magic
from kernel_mcp.policy.source import Source
from kernel_specs.restricted import commands

_INSTALLERS = ("pip", "pip3", "conda", "mamba", "uv", "python", "python3")
_INSTEAD = {
    "bash": "sessions run Python only",
    "cat": "use the read_file tool or Path(name).read_text()",
    "cd": "use paths below the workspace",
    "cp": "use pathlib or the file tools",
    "debug": "print what you need to see",
    "env": "sessions have no environment variables to speak of",
    "load": "use the read_file tool",
    "load_ext": "import the module and call it",
    "ls": "use the list_files tool or Path('.').iterdir()",
    "mkdir": "use Path(name).mkdir()",
    "mv": "use Path(name).rename()",
    "pdb": "print what you need to see",
    "pwd": "use Path.cwd()",
    "rm": "use Path(name).unlink()",
    "run": "use the run_script tool, or put the code into the cell",
    "sh": "sessions run Python only",
    "sql": "use sqlite3",
    "sx": "sessions run Python only",
    "system": "sessions run Python only",
    "wget": "sessions have no network",
    "curl": "sessions have no network",
    "writefile": "use the write_file tool or Path(name).write_text()",
}


def is_harmless(magic: Magic) -> bool:
    """Whether even a restrictive policy lets the command through, as the kernel does.

    The code that such a command runs is checked like any other.
    """
    return magic.kind in ("line", "cell") and commands.is_harmless(magic.name, magic.rest)


def refuse(source: Source, magic: Magic) -> Diagnostic:
    """The error for a command, with what to do instead."""
    if magic.kind == "help":
        text = f"`?` is not available; use help({magic.rest or 'name'})"
    elif magic.kind == "call":
        text = "calls without parentheses are not available; write them in plain Python"
    elif magic.kind == "shell":
        word = (magic.rest.split() or [""])[0]
        text = f"shell commands (`!`) are not allowed in this session; {_instead(word, magic.rest)}"
    else:
        sign = "%%" if magic.kind == "cell" else "%"
        text = (
            f"the command {sign}{magic.name} is not allowed in this session; "
            f"{_instead(magic.name, magic.rest)}"
        )
    if magic.kind != "call":
        text += ". Start the server with --allow '*' to permit it"
    return source.diagnostic("magic", "error", text + ".", magic.line, magic.column)


def _instead(word: str, rest: str) -> str:
    if word in _INSTALLERS and "install" in rest:
        return "use the install tool to add packages"
    return _INSTEAD.get(word, "use plain Python")
