"""The policy: what code may import, and what is said about code before it runs.

A guard rail for well-meaning code. The boundary is the sandbox.

    model        Policy, the allow-list, and how it travels to the kernel
    stdlib       the lists behind the profiles
    check        check(): code → Report, without running anything
    source       guards on the text, places in it
    magics       IPython's own syntax, made plain Python
    parsing      plain Python → syntax tree and code object
    bindings     which names of a cell are modules
    rules        what a restrictive policy refuses in the tree
    salvage      what it refuses in text that does not parse
    commands     what it refuses of IPython's commands
    names        names that nothing defines
    own          modules that a session wrote itself
    scripts      PEP 723 metadata
    diagnostics  Diagnostic, Report and their text
"""

from kernel_mcp.policy.check import check, own_modules
from kernel_mcp.policy.diagnostics import Diagnostic, ImportUse, Report
from kernel_mcp.policy.model import Policy
from kernel_mcp.policy.source import ScriptMetadata, ScriptMetadataError, script_metadata

__all__ = [
    "Diagnostic",
    "ImportUse",
    "Policy",
    "Report",
    "ScriptMetadata",
    "ScriptMetadataError",
    "check",
    "own_modules",
    "script_metadata",
]
