"""What below a mounted folder sessions do not get: known secrets, and doors to processes.

A list of names, as best effort: what has another name is shown. Hard links to what is found, and
what a symbolic link of such a name leads to, count as well.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence

from kernel_mcp.linux.safe_tree import open_beneath

FILE, FOLDER = "file", "folder"
"""What a cover looks like: empty, either way."""
FIXED, KEPT = "fixed", "kept"
"""Below a writable mount: read-only; and what cannot be moved away, as something fixed is in it."""
HIDING = frozenset((FILE, FOLDER))

_FOLDERS = frozenset(
    (
        *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store"),
        *(".terraform.d", ".kaggle", ".envs"),
    )
)
_FOLDERS_BELOW = frozenset(
    (
        *((".config", name) for name in ("gcloud", "gh", "hub", "op", "rclone", "doctl")),
        (".local", "share", "keyrings"),
    )
)
"""Ends of paths."""
_FILES = frozenset(
    (
        *(".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"),
        *(
            ".databrickscfg",
            ".mylogin.cnf",
            ".dockercfg",
            ".boto",
            ".s3cfg",
            ".vault-token",
            ".htpasswd",
        ),
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".credentials.json", ".claude.json"),
        *(".bash_history", ".zsh_history", ".python_history", ".psql_history", ".mysql_history"),
    )
)
_FILES_BELOW = frozenset(
    ((".streamlit", "secrets.toml"), (".cargo", "credentials.toml"), (".codex", "auth.json"))
)
_ENVIRONMENT = ".env"
"""What the names of files with variables begin with."""
_BY_CONTENT = frozenset(
    (
        *("config", "config.worktree", ".gitconfig", ".gitmodules", "pip.conf", "uv.toml"),
        *(".condarc", ".mcp.json", ".yarnrc.yml"),
    )
)
"""Files that are covered when they hold credentials; `config` of git only: below a `….git`."""
_MOST_PARTS = 3
"""Of the ends of paths."""
_CREDENTIALS = re.compile(
    rb"https?://[^/\s@]+@|://[^/\s:@]*:[^/\s@]+@"
    rb"|(?:extraheader|authorization|password|passwd|token|secret|api_?key)[\"']?\s*[=:]",
    re.IGNORECASE,
)
OF_AN_ENVIRONMENT = "pyvenv.cfg"
"""Makes its folder a virtual environment."""
_EXECUTED_FOLDERS = frozenset(
    (
        *(".git", ".claude", ".vscode", ".idea", ".cursor", ".devcontainer", ".husky", ".codex"),
        *(".gemini", ".direnv", ".zed", ".opencode", ".windsurf", ".kiro"),
    )
)
_EXECUTED_FILES = frozenset(
    (
        *(".git", ".mcp.json", ".envrc", ".pre-commit-config.yaml", "kernel-mcp.toml"),
        *(".devcontainer.json", ".gdbinit", ".lldbinit", ".mise.toml", "mise.toml"),
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".profile", ".gitconfig"),
        *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout"),
    )
)
"""What programs of the host execute, or take commands from: of a `.git` the hooks, the settings and
more. As a file it names a folder elsewhere."""
_MOST_READ = 1 << 20
Parts = tuple[str, ...]
"""A path below a mount."""


def secret(parts: Sequence[str], mode: int) -> str | None:
    """The cover for a path below a mount by its name and file mode; None when it is shown.

    Of a link the name of a folder counts as well as that of a file, and no case does: some file
    systems have none.
    """
    if stat.S_ISLNK(mode):
        return secret(parts, stat.S_IFDIR) or secret(parts, stat.S_IFREG)
    parts = [part.lower() for part in parts[-_MOST_PARTS:]]
    name = parts[-1]
    if stat.S_ISDIR(mode):
        below = any(tuple(parts[-len(end) :]) == end for end in _FOLDERS_BELOW)
        return FOLDER if name in _FOLDERS or below else None
    if not stat.S_ISREG(mode):
        return FILE  # a socket, a FIFO or a device: someone listens behind it
    below = any(tuple(parts[-len(end) :]) == end for end in _FILES_BELOW)
    return FILE if name in _FILES or name.startswith(_ENVIRONMENT) or below else None


def secret_folder(parts: Parts) -> Parts:
    """The path of the first folder of secrets that a folder is or lies in; empty without one."""
    ends = (parts[:end] for end in range(1, len(parts) + 1))
    return next((path for path in ends if secret(path, stat.S_IFDIR)), ())


def readable(parts: Sequence[str]) -> str:
    """A path for people; what is no text of one line in it is escaped."""
    text = os.fsencode("/".join(parts)).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def secret_by_name(parts: Sequence[str], above: Parts = ()) -> bool:
    """Whether any component of a path is one of a secret, whatever kind of file it is.

    `above` are the components that the path begins with and that are not asked of.
    """
    return any(
        secret((*above, *parts[:end]), kind) is not None
        for end in range(1, len(parts) + 1)
        for kind in ((stat.S_IFDIR,) if end < len(parts) else (stat.S_IFDIR, stat.S_IFREG))
    )


def executed(parts: Sequence[str], *, folder: bool) -> bool:
    """Whether programs of the host execute what is there, by its name."""
    return parts[-1].lower() in (_EXECUTED_FOLDERS if folder else _EXECUTED_FILES)


def executed_by_name(parts: Sequence[str]) -> bool:
    """Whether a path is of such a file, or leads into such a folder."""
    return executed(parts, folder=False) or any(
        executed(parts[:end], folder=True) for end in range(1, len(parts) + 1)
    )


def judged_by_content(parts: Sequence[str]) -> bool:
    """Whether what a file holds decides."""
    name = parts[-1].lower()
    of_git = any(part.lower().endswith(".git") for part in parts[:-1])
    return name in _BY_CONTENT and (name != "config" or of_git)


def holds_credentials(root: int, parts: Sequence[str]) -> bool:
    """Whether such a file holds any; True for one that cannot be read."""
    try:
        fd = open_beneath(root, parts, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return _CREDENTIALS.search(os.read(fd, _MOST_READ)) is not None
    except OSError:
        return True
    finally:
        os.close(fd)


def around(covers: Mapping[Parts, str]) -> set[Parts]:
    """The folders above what these covers hide or fix."""
    inside = [path for path, kind in covers.items() if kind != KEPT]
    return {path[:end] for path in inside for end in range(len(path))}
