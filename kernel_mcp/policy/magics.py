"""Find IPython syntax as IPython does, and replace it by plain Python with as many lines.

`plain` is called only for code that fails to parse as Python, so no valid code counts as a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from kernel_mcp.policy import Diagnostic, Policy
from kernel_mcp.policy.source import STRING, Source
from kernel_mcp.records import dataclass
from kernel_specs.restricted import config

_TOKEN = re.compile(
    rf"(?P<skip>{STRING}|\#[^\n]*|\\\n|[ \t\f]+|\w+)|(?P<newline>\n)|(?P<open>[(\[{{])"
    r"|(?P<close>[)\]}])|(?P<assign>=)(?![=])|(?P<help>\?)|(?P<other>[=!<>:+\-*/%@&|^]=|.)",
    re.DOTALL,
)
_COMMAND = re.compile(r"(?:[^\\\n]|\\.|\\$)*", re.DOTALL)
_ASSIGNED = re.compile(r"[ \t]*(?:(?P<shell>!)|%(?=[^\W\d]))")
_CELL = re.compile(r"%%(?!\w+\?)(?P<name>[^ \t]*)(?:[ \t](?P<rest>.*))?$")
_AUTOMAGIC = re.compile(
    r"(?P<name>pip3?|conda|mamba|uv|cd|ls|ll|cat|cp|mv|rm|mkdir|rmdir|pwd|env|run|load|load_ext"
    r"|matplotlib|config|time|timeit|who|whos|history|less|more|man)[ \t]+(?P<rest>[^\s=(\[].*)$"
)
_BARE_INSTALL = re.compile(
    r"(?:pip[\d.]*|uv[ \t]+pip|python[\d.]*[ \t]+-m[ \t]+pip)[ \t]+(?:-\S+[ \t]+)*install[ \t]"
)
"""An installation command without `%` or `!`; no Python code begins like this."""
_CLASSIC_PROMPT = re.compile(r"\s*(?:>>>|\.\.\.)[ \t]?")
_IPYTHON_PROMPT = re.compile(r"(?:(?:\[nav\]|\[ins\])? ?In \[\d+\]: |\s*\.{3,}: ?)")


@dataclass(frozen=True, slots=True)
class Command:
    """One use of IPython syntax; `first` and `last` are its lines, from 1.

    `text` is the command as written, with its sign, and `head` what precedes it on the line.
    `name` is the command without `%`, and empty for help, shell and calls; `rest` follows it.
    """

    kind: Literal["line", "cell", "shell", "help", "call"]
    name: str
    rest: str
    first: int
    last: int
    text: str
    head: str = ""


def top_level(source: Source, word: str) -> tuple[Source, tuple[Command, ...]]:
    """Return the source without margins and prompts, and its commands that are not indented.

    Nothing after the last `word` is read, nor below a `%%` line that is not for Python.
    """
    source = _without_margin_and_prompts(source)
    below, _ = _cell_magics(source)
    commands = _commands(below.text, below.text.rfind(word))
    return source, tuple(each for each in commands if not each.head[:1].isspace())


def plain(source: Source) -> tuple[Source, tuple[Command, ...]]:
    """Return the source as plain Python, and the IPython syntax that was replaced.

    Margins and prompts are removed. Commands that time Python code are replaced by that code, all
    others by `pass` or `None`.
    """
    source, found = _cell_magics(_without_margin_and_prompts(source))
    changes: dict[int, tuple[str, int]] = {}
    for each in _commands(source.text, len(source.text)):
        found.append(each)
        code, cut = _timed_code(each), 0
        if code is None:
            code = "None" if each.head.rstrip().endswith("=") else "pass"
        elif each.first == each.last:
            cut = len(each.text) - len(code)
        changes[each.first] = (each.head + code, cut)
        changes.update(dict.fromkeys(range(each.first + 1, each.last + 1), ("", 0)))
    source = source.rewritten(changes)
    if not found and (single := _automagic(source)) is not None:
        found = [single]
        source = source.rewritten({single.first: ("pass", 0)})
    return source, tuple(found)


def _automagic(source: Source) -> Command | None:
    """Return the command of a one-line cell such as `ls x`, which IPython runs as `%ls x`."""
    filled = _filled(source)
    match = _AUTOMAGIC.match(filled[0]) if len(filled) == 1 else None
    if match is None:
        return None
    number = source.lines.index(filled[0]) + 1
    return Command("line", match["name"], match["rest"], number, number, filled[0])


def _filled(source: Source) -> list[str]:
    return [line for line in source.lines if line.strip()]


def _without_margin_and_prompts(source: Source) -> Source:
    first = next(iter(_filled(source)), "")
    cut = len(first) - len(first.lstrip())
    if cut:
        inside = [n for n, line in enumerate(source.lines, 1) if line.startswith(first[:cut])]
        source = source.rewritten({n: (source.lines[n - 1][cut:], cut) for n in inside})
    if any(line.lstrip().startswith(">>>") for line in _filled(source)):
        source = _without(source, _CLASSIC_PROMPT.match)
    if any(_IPYTHON_PROMPT.match(line) for line in _filled(source)[:2]):
        source = _without(source, _IPYTHON_PROMPT.match)
    return source


def _without(source: Source, prompt: Callable[[str], re.Match[str] | None]) -> Source:
    matches = {number: prompt(line) for number, line in enumerate(source.lines, start=1)}
    return source.rewritten(
        {n: (match.string[match.end() :], match.end()) for n, match in matches.items() if match}
    )


def _cell_magics(source: Source) -> tuple[Source, list[Command]]:
    """Remove the `%%` lines at the top, and everything below one that is not for Python.

    Comments may precede them: kernels remove those.

    Returns the source, and the commands found.
    """
    found: list[Command] = []
    changes: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(source.lines, start=1):
        match = _CELL.match(line)
        if match is None:
            if line.strip() and not line.startswith("#"):
                break
            continue
        rest = (match["rest"] or "").strip()
        found.append(Command("cell", match["name"], rest, number, number, line))
        timed = _timed_code(found[-1])
        if timed is None:
            changes.update(dict.fromkeys(range(number, len(source.lines) + 1), ("", 0)))
            break
        changes[number] = (timed, len(line.rstrip()) - len(timed))
        if timed:
            break
    return source.rewritten(changes), found


def _timed_code(command: Command) -> str | None:
    """Return the Python code of a timing command, perhaps empty; None for another command."""
    if command.kind in ("line", "cell") and command.name in ("time", "timeit"):
        return _without_options(command.rest)
    return "" if command.kind == "cell" and command.name == "capture" else None


def _without_options(rest: str) -> str:
    """Return the code after the options of a timing command."""
    words = rest.split()
    taken = 0
    while taken < len(words) - 1 and words[taken].startswith("-"):
        numbered = words[taken] in ("-n", "-r", "-p")
        taken += 2 if numbered and words[taken + 1].isdigit() else 1
    return rest.split(maxsplit=taken)[-1] if taken < len(words) else ""


def _commands(text: str, most: int) -> Iterator[Command]:
    """Yield the commands of a text that begin before `most`."""
    number, counted = 1, 0
    for start, sign, end in _places(text, most):
        number += text.count("\n", counted, start)
        head, written = text[text.rfind("\n", 0, start) + 1 : sign], text[sign:end]
        last = number + text.count("\n", start, end)
        yield Command(*_parted(written), number, last, written, head)
        number, counted = last, end


def _parted(text: str) -> tuple[Literal["line", "shell", "help", "call"], str, str]:
    """Return kind, name and rest of a command, by its sign: `?`, `!`, `%`, or an implicit call."""
    stripped = text.rstrip()
    if stripped.endswith("?") or stripped.startswith("?"):
        return "help", "", stripped.strip("?% ")
    if stripped.startswith("!"):
        return "shell", "", stripped.lstrip("! ")
    if stripped.startswith("%") or _BARE_INSTALL.match(text):
        name, _, rest = stripped.lstrip("% ").partition(" ")
        return "line", name, rest.strip()
    return "call", "", stripped[1:]


def _places(text: str, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield start of the statement, position of the sign, and end of each command before `most`."""
    position, depth = 0, 0
    start: int | None = None
    assigned = False
    while position < min(most, len(text)):
        match = _TOKEN.match(text, position)
        if match is None:
            return
        kind = match.lastgroup
        signed = kind not in ("skip", "newline") and match[0] in "%!?/,;"
        if start is None and (signed or _BARE_INSTALL.match(text, position)):
            end = _end_of_command(text, position)
            yield position, position, end
            position = end
            continue
        if start is None and kind != "newline" and match[0].strip("\\ \t\f\n")[:1] not in ("", "#"):
            start = position
        if kind == "newline" and depth == 0:
            start, assigned = None, False
        elif kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "help" and depth == 0 and start is not None:
            end = _end_of_command(text, position)
            if not text[position:end].strip("? \t"):
                yield start, start, end
                position, start, assigned = end, None, False
                continue
        elif kind == "assign" and depth == 0 and not assigned:
            assigned = True
            sign = _ASSIGNED.match(text, match.end())
            if sign is not None and start is not None:
                end = _end_of_command(text, match.end())
                yield start, sign.end() - 1, end
                position, start, assigned = end, None, False
                continue
        position = match.end()


def _end_of_command(text: str, position: int) -> int:
    match = _COMMAND.match(text, position)
    return match.end() if match is not None else len(text)


_INSTALLERS = ("pip", "pip3", "conda", "mamba", "uv", "python", "python3")


def is_harmless(command: Command) -> bool:
    """Return True if even a restrictive policy permits the command, as the kernel does.

    Code that such a command runs is checked like any other.
    """
    return command.kind in ("line", "cell") and config.is_harmless(command.name, command.rest)


def refuse(source: Source, command: Command, policy: Policy) -> Diagnostic:
    """Return the error for a command, with an alternative that the policy permits."""
    if command.kind == "help":
        text = f"`?` is not available; use help({command.rest or 'name'})"
    elif command.kind == "call":
        text = "calls without parentheses are not available; write them in plain Python"
    elif command.kind == "shell":
        word = (command.rest.split() or [""])[0]
        instead = _instead(word, command.rest, policy)
        text = f"shell commands (`!`) are not allowed in this session; {instead}"
    else:
        sign = "%%" if command.kind == "cell" else "%"
        text = (
            f"the command {sign}{command.name} is not allowed in this session; "
            f"{_instead(command.name, command.rest, policy)}"
        )
    if command.kind != "call":
        text += ". Start the server with --allow '*' to permit it"
    return source.diagnostic("magic", "error", text + ".", command.first, len(command.head) + 1)


def _instead(word: str, rest: str, policy: Policy) -> str:
    if word in _INSTALLERS and "install" in rest and "packages" in policy.tools:
        return "use the install tool to add packages"
    tools = " or the tools for files" if "files" in policy.tools else ""
    return f"use plain Python{tools}"
