"""The metadata of a notebook that name its kernel and its language."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kernel_mcp.output.text import one_line

PYTHON_METADATA: Mapping[str, Any] = MappingProxyType(
    {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python", "file_extension": ".py"},
    }
)


def notebook_of(language: str) -> Mapping[str, Any]:
    """Return the fields `kernelspec` and `language_info` of notebooks in a language."""
    if language.lower() in ("", "python"):
        return PYTHON_METADATA
    spec = {"name": language.lower(), "display_name": language, "language": language}
    return {"kernelspec": spec, "language_info": {"name": language}}


def language_of(metadata: object) -> str:
    """Return the language that the metadata of a notebook names; empty if they name none."""
    spec, info = (
        object_of(object_of(metadata).get(name)) for name in ("kernelspec", "language_info")
    )
    for given in (spec.get("language"), info.get("name")):
        if isinstance(given, str) and given.strip():
            return _language(given)
    kernels = (spec.get("name"), spec.get("display_name"))
    return next(filter(None, map(_language_of_kernel, kernels)), "")


def object_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_PYTHON = "Python"
_LANGUAGES = {"r": "R", "c++": "C++", "c#": "C#", "f#": "F#", "sql": "SQL"} | {
    "javascript": "JavaScript",
    "typescript": "TypeScript",
    "matlab": "MATLAB",
}
_KERNELS = {
    **dict.fromkeys(("ir", "irkernel", "r", "xr"), "R"),
    **dict.fromkeys(("julia", "ijulia"), "Julia"),
    **dict.fromkeys(("bash", "zsh", "sh", "calysto_bash"), "Bash"),
    **dict.fromkeys(("deno", "javascript", "ijavascript", "jslab", "tslab"), "JavaScript"),
    **dict.fromkeys(("xcpp", "cpp", "cling"), "C++"),
    **dict.fromkeys(("ruby", "iruby"), "Ruby"),
    **dict.fromkeys(("sql", "xsql"), "SQL"),
    **dict.fromkeys(("octave", "xoctave"), "Octave"),
    **dict.fromkeys(("scala", "almond"), "Scala"),
    **dict.fromkeys(("rust", "evcxr"), "Rust"),
    **dict.fromkeys(("gophernotes", "gonb"), "Go"),
    **dict.fromkeys(("haskell", "ihaskell"), "Haskell"),
    "matlab": "MATLAB",
    "sagemath": "Sage",
    "kotlin": "Kotlin",
    ".net-csharp": "C#",
    ".net-fsharp": "F#",
    ".net-powershell": "PowerShell",
}
"""Languages by the names of their kernels, without version, where a file names only the kernel."""


def _language(given: str) -> str:
    """Return the usual spelling of a language's name."""
    name = one_line(given.strip(), 40)
    plain = name.lower()
    if plain.removeprefix("i").startswith("python"):
        return _PYTHON
    return _LANGUAGES.get(plain, name if name[:1].isupper() else name.capitalize())


def _language_of_kernel(given: object) -> str:
    """Return the language of the kernel with this name; empty for an unknown one."""
    name = given.strip().lower()[:80] if isinstance(given, str) else ""
    words = name.replace("-", " ").split()
    word = words[0].rstrip("0123456789.") if words else ""
    if word.lstrip("ix").startswith("python"):
        return _PYTHON
    return _KERNELS.get(name) or _KERNELS.get(word, "")
