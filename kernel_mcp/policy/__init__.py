"""The policy: what code may import, and what is said about code before it runs.

A guard rail for well-meaning code. The boundary is the sandbox.

    profiles     what each profile lets code do, and which is in force
    model        Policy, Diagnostic, Report and their text
    check        check(): code → Report, without running anything
    source       guards on the text, places in it, PEP 723 metadata
    magics       IPython's own syntax, made plain Python
    rules        what a restrictive policy refuses in the tree
    missing      the next step where a module is not there
"""

from kernel_mcp.policy.check import check, own_modules
from kernel_mcp.policy.model import Diagnostic, ImportUse, Policy, Report
from kernel_mcp.policy.source import (
    ScriptMetadata,
    ScriptMetadataError,
    line_of_key,
    script_metadata,
)

__all__ = [
    "Diagnostic",
    "ImportUse",
    "Policy",
    "Report",
    "ScriptMetadata",
    "ScriptMetadataError",
    "check",
    "line_of_key",
    "own_modules",
    "script_metadata",
]
