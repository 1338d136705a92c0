"""IPython syntax: found as IPython finds it, and replaced by plain Python with as many lines.

Only code that fails to parse as plain Python gets here, so no valid code is taken for a command.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from kernel_mcp.policy import Diagnostic, Policy
from kernel_mcp.policy.source import STRING, Source
from kernel_mcp.records import dataclass
from kernel_specs.restricted import config

MagicKind: TypeAlias = Literal["line", "cell", "shell", "help", "call"]

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
class Magic:
    """One use of IPython syntax; `line` and `column` (from 1) are positions in the plain form.

    `name` is the command without `%`, and empty for help, shell and calls. `rest` is the text
    after it.
    """

    kind: MagicKind
    name: str
    rest: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command as written: `text` with its sign, `head` before it, and its lines (from 1)."""

    head: str
    text: str
    first: int
    last: int


def top_level(source: Source, word: str) -> tuple[Source, tuple[Command, ...]]:
    """Return the source without margins and prompts, and its commands that are not indented.

    Nothing after the last `word` is read, nor below a `%%` line that is not for Python.
    """
    source = _without_prompts(_without_margin(source))
    below, _ = _cell_magics(source)
    commands = _written(below.text, below.text.rfind(word))
    return source, tuple(each for each in commands if not each.head[:1].isspace())


def plain(source: Source) -> tuple[Source, tuple[Magic, ...]]:
    """Return the source as plain Python, and the IPython syntax that was replaced.

    Margins and prompts are removed. Commands that time Python code are replaced by that code, all
    others by `pass` or `None`.
    """
    source = _without_prompts(_without_margin(source))
    source, found = _cell_magics(source)
    magics: list[Magic] = list(found)
    changes: dict[int, tuple[str, int]] = {}
    for each in _written(source.text, len(source.text)):
        magic = command(each.text, each.first, len(each.head) + 1)
        magics.append(magic)
        timed = _timed_code(magic)
        if timed is not None:
            cut = 0 if each.last > each.first else len(each.text) - len(timed)
            changes[each.first] = (each.head + timed, cut)
        elif each.head.rstrip().endswith("="):
            changes[each.first] = (each.head + "None", 0)
        else:
            changes[each.first] = (each.head + "pass", 0)
        changes.update(dict.fromkeys(range(each.first + 1, each.last + 1), ("", 0)))
    return source.rewritten(changes), tuple(magics)


def automagic(source: Source) -> Magic | None:
    """Return the command of a one-line cell such as `pip install x`, or None.

    IPython takes it as `%pip`.
    """
    filled = [(number, line) for number, line in enumerate(source.lines, 1) if line.strip()]
    if len(filled) != 1:
        return None
    number, line = filled[0]
    match = _AUTOMAGIC.match(line.strip())
    if match is None:
        return None
    column = len(line) - len(line.lstrip()) + 1
    return Magic("line", match["name"], match["rest"], number, column)


def _without_margin(source: Source) -> Source:
    filled = [line for line in source.lines if line.strip()]
    if not filled or not filled[0][0].isspace():
        return source
    dedented = textwrap.dedent("\n".join(source.lines)).split("\n")
    return source.rewritten(
        {
            number: (new, len(old) - len(new) if new else 0)
            for number, (old, new) in enumerate(zip(source.lines, dedented, strict=True), start=1)
        }
    )


def _without_prompts(source: Source) -> Source:
    filled = [line for line in source.lines if line.strip()]
    if any(line.lstrip().startswith(">>>") for line in filled):
        source = _without(source, _CLASSIC_PROMPT.match)
        filled = [line for line in source.lines if line.strip()]
    if any(_IPYTHON_PROMPT.match(line) for line in filled[:2]):
        source = _without(source, _IPYTHON_PROMPT.match)
    return source


def _without(source: Source, prompt: Callable[[str], re.Match[str] | None]) -> Source:
    changes = {}
    for number, line in enumerate(source.lines, start=1):
        match = prompt(line)
        if match is not None:
            changes[number] = (line[match.end() :], match.end())
    return source.rewritten(changes)


def _cell_magics(source: Source) -> tuple[Source, list[Magic]]:
    """Remove the `%%` lines at the top, and everything below one that is not for Python.

    Returns the source, and the commands found.
    """
    found: list[Magic] = []
    changes: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(source.lines, start=1):
        match = _CELL.match(line)
        if match is None:
            if line.strip():
                break
            continue
        magic = Magic("cell", match["name"], (match["rest"] or "").strip(), number, 1)
        found.append(magic)
        timed = _timed_code(magic)
        if timed is None:
            changes.update(dict.fromkeys(range(number, len(source.lines) + 1), ("", 0)))
            break
        changes[number] = (timed, len(line.rstrip()) - len(timed))
        if timed:
            break
    return source.rewritten(changes), found


def _timed_code(magic: Magic) -> str | None:
    """Return the Python code of a timing command, perhaps empty; None for another command."""
    if magic.kind in ("line", "cell") and magic.name in ("time", "timeit"):
        return _without_options(magic.rest.strip())
    return "" if magic.kind == "cell" and magic.name == "capture" else None


def _without_options(rest: str) -> str:
    """Return the code after the options of a timing command."""
    words = rest.split()
    taken = 0
    while taken < len(words) - 1 and words[taken].startswith("-"):
        numbered = words[taken] in ("-n", "-r", "-p")
        taken += 2 if numbered and words[taken + 1].isdigit() else 1
    return rest.split(maxsplit=taken)[-1] if taken < len(words) else ""


def _written(text: str, most: int) -> Iterator[Command]:
    number, counted = 1, 0
    for start, sign, end in _commands(text, most):
        number += text.count("\n", counted, start)
        begin = text.rfind("\n", 0, start) + 1
        last = number + text.count("\n", start, end)
        yield Command(text[begin:sign], text[sign:end], number, last)
        number, counted = last, end


def _commands(text: str, most: int) -> Iterator[tuple[int, int, int]]:
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


def command(text: str, line: int, column: int) -> Magic:
    """Return the command of a text, by its sign: `?`, `!`, `%`, or one of an implicit call."""
    stripped = text.rstrip()
    if stripped.endswith("?") or stripped.startswith("?"):
        return Magic("help", "", stripped.strip("?% "), line, column)
    if stripped.startswith("!"):
        return Magic("shell", "", stripped.lstrip("! "), line, column)
    if stripped.startswith("%"):
        name, _, rest = stripped.lstrip("% ").partition(" ")
        return Magic("line", name, rest.strip(), line, column)
    if _BARE_INSTALL.match(text):
        name, _, rest = stripped.partition(" ")
        return Magic("line", name, rest.strip(), line, column)
    return Magic("call", "", stripped[1:], line, column)


_INSTALLERS = ("pip", "pip3", "conda", "mamba", "uv", "python", "python3")


def is_harmless(magic: Magic) -> bool:
    """Return True if even a restrictive policy permits the command, as the kernel does.

    Code that such a command runs is checked like any other.
    """
    return magic.kind in ("line", "cell") and config.is_harmless(magic.name, magic.rest)


def refuse(source: Source, magic: Magic, policy: Policy) -> Diagnostic:
    """Return the error for a command, with an alternative that the policy permits."""
    if magic.kind == "help":
        text = f"`?` is not available; use help({magic.rest or 'name'})"
    elif magic.kind == "call":
        text = "calls without parentheses are not available; write them in plain Python"
    elif magic.kind == "shell":
        word = (magic.rest.split() or [""])[0]
        instead = _instead(word, magic.rest, policy)
        text = f"shell commands (`!`) are not allowed in this session; {instead}"
    else:
        sign = "%%" if magic.kind == "cell" else "%"
        text = (
            f"the command {sign}{magic.name} is not allowed in this session; "
            f"{_instead(magic.name, magic.rest, policy)}"
        )
    if magic.kind != "call":
        text += ". Start the server with --allow '*' to permit it"
    return source.diagnostic("magic", "error", text + ".", magic.line, magic.column)


def _instead(word: str, rest: str, policy: Policy) -> str:
    if word in _INSTALLERS and "install" in rest and "packages" in policy.tools:
        return "use the install tool to add packages"
    tools = " or the tools for files" if "files" in policy.tools else ""
    return f"use plain Python{tools}"
