"""`check`: everything that can be said about code without running it."""

from __future__ import annotations

from dataclasses import replace

from kernel_mcp.policy import commands, magics
from kernel_mcp.policy.diagnostics import Diagnostic, ImportUse, Report
from kernel_mcp.policy.magics import Magic
from kernel_mcp.policy.model import Policy
from kernel_mcp.policy.names import undefined_names
from kernel_mcp.policy.parsing import Parsed, parse
from kernel_mcp.policy.rules import apply_rules
from kernel_mcp.policy.salvage import salvage
from kernel_mcp.policy.scripts import ScriptMetadataError, script_metadata
from kernel_mcp.policy.source import Source, guard

MAX_DIAGNOSTICS = 50


def check(
    code: str,
    policy: Policy,
    *,
    known_names: frozenset[str] | None = None,
    own_modules: frozenset[str] = frozenset(),
    python: str = "",
    compiled: bool = True,
) -> Report:
    """Report syntax, imports, refusals, undefined names and script metadata of a cell.

    known_names  variables of the live session; None leaves out the search for undefined names
    own_modules  modules that lie in the session's workspace and may be imported
    python       version of the session's Python, mentioned where this server's may judge otherwise
    compiled     False leaves out what only the compiler behind the parser objects to
    """
    note = f"Allowed here: {policy.summary()}."
    policy = replace(policy, modules=policy.modules | own_modules)
    source = Source.of(code)
    unusable = guard(source, code)
    if unusable is not None:
        return Report(valid=False, diagnostics=(unusable,))
    source, parsed, found = _parse(source, python, compiled)
    diagnostics = list(parsed.diagnostics)
    imports: tuple[ImportUse, ...] = ()
    if not policy.allow_all:
        diagnostics += [
            commands.refuse(source, magic) for magic in found if not commands.is_harmless(magic)
        ]
    if parsed.tree is not None:
        findings = apply_rules(source, parsed.tree, policy)
        diagnostics += findings.diagnostics
        imports = tuple(sorted(findings.imports, key=lambda use: use.line))
    elif not policy.allow_all:
        diagnostics += salvage(source, policy)
    plain = all(commands.is_harmless(magic) for magic in found)
    if known_names is not None and parsed.code is not None and plain:
        diagnostics += undefined_names(source, parsed.code, known_names)
    diagnostics += _metadata(source, code)
    refused = any(not use.allowed for use in imports)
    return Report(
        valid=all(item.severity != "error" for item in diagnostics),
        diagnostics=_limited(diagnostics),
        imports=imports,
        note=note if refused else "",
    )


def _parse(source: Source, python: str, compiled: bool) -> tuple[Source, Parsed, tuple[Magic, ...]]:
    """Parse as plain Python, and only where that fails as IPython would read it."""
    parsed = parse(source, python=python, compiled=compiled)
    if parsed.tree is not None or any(item.kind == "depth" for item in parsed.diagnostics):
        return source, parsed, ()
    plain, found = magics.plain(source)
    if not found:
        single = magics.automagic(plain)
        if single is not None:
            found = (single,)
            plain = plain.rewritten({single.line: ("pass", 0)})
    if plain == source:
        return source, parsed, ()
    return plain, parse(plain, python=python, compiled=compiled), found


def _metadata(source: Source, code: str) -> list[Diagnostic]:
    try:
        script_metadata(code)
    except ScriptMetadataError as error:
        return [source.diagnostic("pep723", "error", error.reason, error.line, 1)]
    return []


def _limited(diagnostics: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """In the order of the code; when there are too many, errors are kept before warnings."""
    chosen = sorted(diagnostics, key=lambda item: item.severity != "error")[:MAX_DIAGNOSTICS]
    chosen.sort(key=lambda item: (item.line, item.column))
    left_out = len(diagnostics) - len(chosen)
    if left_out:
        chosen[-1] = replace(
            chosen[-1], message=f"{chosen[-1].message} ({left_out} more problems are not shown)"
        )
    return tuple(chosen)
