"""Installations written into a cell, such as `%pip install polars`, done before the cell runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import anyio

from kernel_mcp.environments.metadata import modules_of
from kernel_mcp.errors import InputError, InstallError, KernelMcpError
from kernel_mcp.identity import INSTALL
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.requirements import InstallRules, listed
from kernel_mcp.packages.result import InstallOutcome
from kernel_mcp.policy import Policy, words
from kernel_mcp.policy.magics import Command, top_level
from kernel_mcp.policy.source import Source, guard
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.session import Session

_PYTHON = r"""["']?(?:\{sys\.executable\}|\$\{?sys\.executable\}?|(?:[\w./]*/)?python[\d.]*)["']?"""
_INSTALL = re.compile(
    rf"(?:[!%]{{0,2}}[ \t]*)(?:(?:sx|system|sudo)[ \t]+)?(?:{_PYTHON}[ \t]+-m[ \t]+)?(?:uv[ \t]+)?"
    r"pip[\d.]*[ \t]+(?P<before>(?:-\S+[ \t]+)*)install(?:[ \t](?P<words>.*))?$",
    re.DOTALL,
)
_PASSED_OVER = words(
    """
    -q --quiet -v --verbose -y --yes --user --system --no-input --no-color --no-cache --no-cache-dir
    --disable-pip-version-check --no-warn-script-location --no-warn-conflicts --prefer-binary
    --break-system-packages --no-python-version-warning --use-pep517 --no-build-isolation --isolated
    --no-progress --compile --no-compile --link-mode --progress-bar --root-user-action --retries
    --timeout --default-timeout --upgrade-strategy --trusted-host --cache-dir --only-binary
    --use-feature --compile-bytecode --exists-action --python --no-config
    """
)
"""Options that are ignored."""
_RENEW = words(
    "-U --upgrade --force-reinstall --ignore-installed -I --reinstall --upgrade-package -P"
)
_WITH_VALUE = words(
    """
    --link-mode --progress-bar --root-user-action --retries --timeout --default-timeout
    --upgrade-strategy --trusted-host --cache-dir --only-binary --use-feature --exists-action
    --python
    """
)
_FILES = "read that file and give the names in it, or pass them to the tool install"
_INDEX = (
    "leave it out; packages come from the index of this server, which its operator sets with "
    "--index-url"
)
_BY_NAME = (
    "packages are installed by name from the index of this server; code that lies in the "
    "workspace is imported without an installation"
)
_INSTEAD = {
    **dict.fromkeys(words("-r --requirement -c --constraint"), _FILES),
    **dict.fromkeys(
        words("-i --index-url --extra-index-url --index --default-index -f --find-links"), _INDEX
    ),
    **dict.fromkeys(words("-e --editable"), _BY_NAME),
    "--pre": "name the version, such as polars==2.0rc1",
}
_SHORT = re.compile(r"-[qvyUI]+")
_REDIRECTION = re.compile(r"(?:\d|&)?>{1,2}(?!=)(?P<to>.*)")
MOST_CHARS = 10_000
"""Characters of one installation."""
_SEPARATORS = ("&&", "||", ";", "&")
_EVERYTHING = Policy(frozenset(), allow_all=True)
NOT_RUN = "No line of this cell was run."


class LineError(InputError):
    """An installation in a cell that is not supported. `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason} Nothing was installed. {NOT_RUN}")
        self.line = line


@dataclass(frozen=True, slots=True)
class InstallLine:
    """One installation of a cell: its place and packages; `renew` to upgrade them."""

    place: Command
    packages: tuple[str, ...]
    renew: bool


@dataclass(frozen=True, slots=True)
class InstallCell:
    """A cell with installations at its top level."""

    source: Source
    lines: tuple[InstallLine, ...]

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages of all lines, in order."""
        return tuple(name for line in self.lines for name in line.packages)

    def code(self, say: Callable[[InstallLine], str]) -> str:
        """Return the code with each installation replaced by a `print` of `say(line)`.

        The number of lines stays the same.
        """
        changes: dict[int, tuple[str, int]] = {}
        for line in self.lines:
            place, text = line.place, say(line)
            shown = f"{place.head}[{text!r}]" if place.head else f"print({text!r})"
            changes[place.first] = (shown, 0)
            changes.update(dict.fromkeys(range(place.first + 1, place.last + 1), ("", 0)))
        return self.source.rewritten(changes).text

    @property
    def rest(self) -> str:
        """The code without the installations; the number of lines stays the same."""
        return self.code(lambda _line: "")


def may_install(code: str) -> bool:
    """Return False for code without an installation; a test of two words with false positives."""
    return "install" in code and "pip" in code


def install_cell(code: str) -> InstallCell | None:
    """Return a cell's installations at its top level; None if there is none.

    Raises LineError for unsupported options or sources.
    """
    if not may_install(code):
        return None
    source = Source.of(code)
    if guard(source, code) is not None:
        return None
    source, commands = top_level(source, "install")
    lines = tuple(
        _line(each, match)
        for each in commands
        if (match := _INSTALL.match(each.text.strip())) is not None
    )
    return InstallCell(source, lines) if lines else None


def _line(place: Command, match: re.Match[str]) -> InstallLine:
    try:
        options, names = _parted(f"{match['before']} {match['words'] or ''}")
    except InputError as error:
        raise LineError(place.first, str(error)) from None
    packages = tuple(listed(names))
    if not packages:
        reason = "the installation names no package; name at least one, such as polars."
        raise LineError(place.first, reason)
    return InstallLine(place, packages, renew=not _RENEW.isdisjoint(options))


def _parted(text: str) -> tuple[list[str], list[str]]:
    """Return the options and names of a pip command. Raises InputError if it is not supported."""
    options: list[str] = []
    names: list[str] = []
    words = iter(_words(text))
    for word in words:
        if word == "|":
            break
        if word in _SEPARATORS or word.endswith(";"):
            raise InputError("put the installation on a line of its own, without other commands.")
        redirected = _REDIRECTION.fullmatch(word)
        if redirected is not None:
            if not redirected["to"]:
                next(words, None)
        elif word.startswith("-"):
            options += _option(word, words)
        elif names and (word[0] in "<>=!~," or names[-1][-1] in "<>=~,"):
            names[-1] += word
        else:
            names.append(_name(word))
    return options, names


def _words(text: str) -> list[str]:
    if len(text) > MOST_CHARS:
        raise InputError("the installation is too long; install fewer packages at once.")
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise InputError(f"the installation cannot be read: {error}.") from None
    if words and words[-1].endswith(";"):
        words[-1] = words[-1][:-1]
    return [word for word in words if word]


def _option(word: str, words: Iterator[str]) -> list[str]:
    name, same, _ = word.partition("=")
    if _SHORT.fullmatch(word):
        return [f"-{letter}" for letter in word[1:]]
    if word[:2] in _INSTEAD and not word.startswith("--"):
        name = word[:2]
    if name not in _PASSED_OVER | _RENEW:
        instead = _INSTEAD.get(name, "leave the option out")
        raise InputError(f"`{name}` of an installation is not available here: {instead}.")
    if name in _WITH_VALUE and not same:
        next(words, None)
    return [name]


def _name(word: str) -> str:
    if "{" in word or "$" in word:
        raise InputError(
            f"{word!r} is not known before the cell runs: write the names of packages out, or pass "
            "them to the tool install."
        )
    wheel = word.endswith((".whl", ".zip", ".gz", ".txt", ".toml"))
    if wheel or word.startswith((".", "~")) or "/" in word or "@" in word:
        raise InputError(f"{word!r} cannot be installed: {_BY_NAME}.")
    return word


@dataclass(frozen=True, slots=True)
class Plan:
    """How `execute` would handle the installations of a cell.

    code     the cell without them; the number of lines stays the same
    modules  modules that the packages are expected to provide
    problem  the reason for refusing them, at `line`; empty if they would be accepted
    """

    code: str
    modules: tuple[str, ...] = ()
    problem: str = ""
    line: int = 1


def plan(code: str, rules: InstallRules) -> Plan:
    """Return how `execute` would handle the installations of a cell; nothing is installed."""
    try:
        found = install_cell(code)
    except LineError as error:
        return Plan(code, problem=str(error), line=error.line)
    if found is None:
        return Plan(code)
    rest = found.rest
    try:
        wanted = rules.admit(found.packages)
    except KernelMcpError as error:
        return Plan(rest, problem=str(error), line=found.lines[0].place.first)
    return Plan(rest, modules_of(each.name for each in wanted))


async def runs(code: str, checks: Checks) -> bool:
    """Return True if code has no syntax error and is not refused. Raises ServerFailure."""
    report = await checks.check(code, _EVERYTHING)
    return not report.syntax_errors and not report.refusals


class CellInstallations:
    """Installs the packages that cells name, by the rules of `install`, before the cells run."""

    def __init__(self, installer: Installer, checks: Checks) -> None:
        self._installer = installer
        self._checks = checks

    def concerns(self, code: str) -> bool:
        """Return True if a cell may contain an installation; a quick test with false positives."""
        return may_install(code)

    async def prepare(self, session: Session, cell: Cell) -> None:
        """Install the packages that a cell names; replace the lines by prints of the outcome.

        Does nothing for a cell with a syntax error. Raises KernelMcpError when a package cannot be
        installed or does not work.
        """
        found = await anyio.to_thread.run_sync(install_cell, cell.code)
        if found is None or not await runs(found.rest, self._checks):
            return
        rules = self._installer.rules
        outcome = InstallOutcome(())
        try:
            wanted = rules.admit(found.packages)
            if wanted:
                cell.who.require(INSTALL, "An installation in a cell")
                outcome = await self._installer.install(session, wanted, cell.step)
        except KernelMcpError as error:
            raise InstallError(f"{error}\n{NOT_RUN}") from error
        if outcome.failed:
            raise InstallError(f"{outcome.summary()}\n{NOT_RUN}")
        told = {line.place.first: _as_output(outcome, rules, line) for line in found.lines}
        cell.plain = found.code(lambda line: told[line.place.first])
        cell.installed = " ".join(told.values())


def _as_output(outcome: InstallOutcome, rules: InstallRules, line: InstallLine) -> str:
    """Return the outcome for the packages of a line, as one line of text."""
    asked = rules.admit(line.packages)
    names = {each.name for each in asked}
    told = outcome.sentences(names)
    if len(names) < len(line.packages):
        told.append("What is part of Python itself needs no installation.")
    if line.renew and any(each.name in names and not each.changed for each in outcome.packages):
        told.append("For another release give its version, as in polars==1.30.")
    return " ".join(told)
