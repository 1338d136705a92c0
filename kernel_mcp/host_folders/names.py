"""Tables of names below mounted folders: secrets, files hosts execute, and files agents obey.

All names are in lower case, as some file systems ignore case. A tuple is the end of a path.
"""

from __future__ import annotations

MOST_PARTS = 3
"""Maximal length of the ends of paths in the tables."""

SECRET_FOLDERS = frozenset(
    (
        *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".oci"),
        *(".terraform.d", ".kaggle", ".envs", ".aliyun", ".bluemix", ".snowsql", ".fly"),
        *(".zsh_sessions", ".bash_sessions"),
    )
)
_BELOW_CONFIG = (
    *("gcloud", "gh", "hub", "op", "rclone", "doctl", "glab-cli", "sops", "heroku", "stripe"),
    *("netlify", "github-copilot", "snowflake", "configstore"),
)
SECRET_FOLDERS_BELOW = frozenset(
    (
        *((".config", name) for name in _BELOW_CONFIG),
        (".local", "share", "keyrings"),
        (".local", "share", "kwalletd"),
        (".subversion", "auth"),
    )
)
SECRET_FILES = frozenset(
    (
        *(".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"),
        *(".databrickscfg", ".mylogin.cnf", ".dockercfg", ".boto", ".s3cfg", ".vault-token"),
        *(".htpasswd", ".credentials.json", ".claude.json", ".terraformrc", ".rclone.conf"),
        *(".lesshst", ".viminfo", ".histfile", ".rhistory", "fish_history", "python_history"),
        *(".history", ".zhistory"),
    )
)
SECRET_FILES_BELOW = frozenset(
    (
        *(("huggingface", name) for name in ("token", "stored_tokens")),
        *((".huggingface", name) for name in ("token", "stored_tokens")),
        *((".cargo", name) for name in ("credentials", "credentials.toml")),
        *((".config", "git", name) for name in ("credentials", "credentials-cache")),
        *((".config", name) for name in ("hub", "doctl", "gist")),
        (".config", "containers", "auth.json"),
        (".config", "pypoetry", "auth.toml"),
        (".config", "configstore", "firebase-tools.json"),
        (".streamlit", "secrets.toml"),
        (".codex", "auth.json"),
        (".gemini", "oauth_creds.json"),
        (".composer", "auth.json"),
        (".gem", "credentials"),
        (".m2", "settings.xml"),
        (".m2", "settings-security.xml"),
        (".julia", "logs", "repl_history.jl"),
    )
)
VARIABLES = ".env"
"""Prefix of files with environment variables."""
KEY_KINDS = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_xmss")
"""Prefixes of key files. A public key ends in `PUBLIC`."""
PUBLIC = ".pub"
HISTORY = "_history"
"""Suffix of history files of shells and similar tools, which begin with a dot."""
KEYS, KEY_ENDS = "id_", (".pem", ".key")
"""Prefix and suffixes of files that may be private keys; their content decides."""
SETTINGS = frozenset(
    (
        *("config.worktree", ".gitconfig", ".gitmodules", "pip.conf", "pip.ini", "uv.toml"),
        *(".condarc", ".mcp.json", "mcp.json", ".yarnrc.yml", ".hgrc", "hgrc", ".wgetrc"),
        *(".curlrc", "nuget.config", "gradle.properties", "opencode.json", "opencode.jsonc"),
        *("mise.toml", ".mise.toml", "mise.local.toml", ".mise.local.toml"),
    )
)
"""Files that are secrets when they hold credentials."""
SETTINGS_OF_GIT = "config"
"""Name treated as in `SETTINGS` below a folder that ends in `.git`."""
SETTINGS_OF_AGENTS = frozenset(
    (
        *("settings.json", "settings.local.json", "config.toml", "config.json", "config.yaml"),
        *("launch.json", "tasks.json", "devcontainer.json"),
    )
)
"""Names treated as in `SETTINGS` directly in one of `AGENTS`."""

BACKUPS = (
    *(".un~", ".bak", ".backup", ".orig", ".old", ".save", ".tmp", ".new", ".lock"),
    *(".rej", ".dpkg-old", ".dpkg-dist", ".dpkg-new", ".rpmsave", ".rpmnew", ".kate-swp"),
    *("___jb_tmp___", "___jb_old___", "~"),
)
"""Suffixes that editors and package managers append to the name of a file that they copy."""
COPIES = ("bak", "backup", "bck", "bkp", "copy", "old", "orig", "original", "save", "saved", "tmp")
"""Words for copies of a file or folder, after a dot, a dash or an underscore."""
SWAP = ".sw"
"""Suffix of vim's swap files, without its last letter."""

AGENTS = frozenset(
    (
        *(".claude", ".codex", ".gemini", ".cursor", ".windsurf", ".kiro", ".opencode", ".zed"),
        *(".continue", ".cline", ".clinerules", ".roo", ".kilocode", ".goose", ".augment"),
        *(".junie", ".trae", ".qwen", ".crush", ".factory", ".amazonq", ".agents", ".copilot"),
        *(".vscode", ".idea", ".fleet", ".devcontainer"),
    )
)
"""Folders of agents and editors, whose settings name programs to start."""
ENVIRONMENT = "pyvenv.cfg"
"""File that makes its folder a virtual environment."""
EXECUTED = AGENTS | frozenset(
    (
        # version control: hooks, settings, and links to folders with both
        *(".git", ".hg", ".jj", ".sl", ".bzr", "_darcs", ".pijul", ".p4config", ".gitconfig"),
        *(".hgrc", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml", ".husky", ".overcommit"),
        *(".overcommit.yml", ".git-hooks", ".lefthook", ".lefthook-local"),
        # shells, and tools that run when a shell enters a folder
        *(
            ".env",
            ".envrc",
            ".envrc.local",
            ".envrc.private",
            ".direnv",
            ".mise",
            "mise-tasks",
            ".mise-tasks",
            ".rtx.toml",
        ),
        *(".tool-versions", ".autoenv", ".autoenv.zsh"),
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile"),
        *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc"),
        *(".login", ".xprofile", ".xinitrc", ".pam_environment", ".inputrc"),
        # interpreters, debuggers and editors that read a file of the current folder
        *(".pdbrc", ".gdbinit", ".lldbinit", ".rprofile", ".renviron", ".rdata", ".irbrc"),
        *(".pryrc", ".octaverc", ".sqliterc", ".psqlrc", ".vimrc", ".exrc", ".nvimrc", ".nvim.lua"),
        *(".lvimrc", ".dir-locals.el", ".dir-locals-2.el", ".emacs", ".emacs.el", ".emacs.d"),
        # package managers and build tools, whose settings name programs to run
        *(".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".pnpmfile.mjs", ".bazelrc"),
        # agents and this program
        *(".mcp.json", "opencode.json", "opencode.jsonc", "crush.json", ".crush.json"),
        *(".aider.conf.yml", ".roomodes", ".devcontainer.json", "kernel-mcp.toml"),
        # notebooks, and settings that Git hooks read
        *(".ipython", ".jupyter", ".jupytext.py", ".lintstagedrc", ".commitlintrc"),
    )
)
"""Names that programs of the host execute or take commands from, whatever the kind of file.

In a `.git` folder these are the hooks, the settings and more. A `.git` file names a folder
elsewhere."""
EXECUTED_BELOW = frozenset(
    (
        *((".config", name) for name in ("fish", "autostart", "systemd", "git", "mise", "nvim")),
        *((".config", name) for name in ("mise.toml", "mise.local.toml", "lefthook.yml", "zsh")),
        ("mise", "config.toml"),
        ("mise", "config.local.toml"),
        *((".cargo", name) for name in ("config", "config.toml")),
        *((".mvn", name) for name in ("jvm.config", "maven.config", "extensions.xml", "wrapper")),
        (".bundle", "config"),
    )
)
OF_SETTINGS = (".yml", ".yaml", ".json", ".jsonc", ".toml")
"""Suffixes of settings files."""
_OF_HOOKS = (".lintstagedrc", ".commitlintrc", "lint-staged.config", "commitlint.config")
FRAMES = (
    *(("mise.", ".toml"), (".mise.", ".toml"), ("jupyter_", "_config.py")),
    *(("jupyter_", "_config.json"), ("ipython_", "config.py"), ("", ".code-workspace")),
    ("", ".sublime-project"),
    *((name, ext) for name in ("lefthook", ".lefthook") for ext in OF_SETTINGS),
    *((name, ext) for name in _OF_HOOKS for ext in (*OF_SETTINGS, ".js", ".cjs", ".mjs", ".ts")),
)
"""Prefixes and suffixes of further names that hosts execute."""
_TABLES = (
    *(SECRET_FOLDERS, SECRET_FOLDERS_BELOW, SECRET_FILES, SECRET_FILES_BELOW, SETTINGS),
    *(SETTINGS_OF_AGENTS, {SETTINGS_OF_GIT}, EXECUTED, EXECUTED_BELOW),
)
LAST = frozenset(each if isinstance(each, str) else each[-1] for table in _TABLES for each in table)
BEGINNINGS = (".", "#", *KEY_KINDS, KEYS, *(first for first, _ in FRAMES if first))
_OF_COPIES = (f"{sign}{word}" for sign in "._-" for word in ("", *COPIES))
ENDS = (*BACKUPS, *_OF_COPIES, *KEY_ENDS, *(last for first, last in FRAMES if not first))
"""Last components, prefixes and suffixes. A name that any table matches has one of them."""
OBEYED = frozenset(
    (
        *("claude.md", "claude.local.md", "agents.md", "agents.override.md", "agent.md"),
        *("gemini.md", "qwen.md", "crush.md", "warp.md", ".rules", ".cursorrules"),
        *(".windsurfrules", ".clinerules", ".goosehints", ".gitmodules", ".gitlab-ci.yml"),
        *(".travis.yml", ".drone.yml", "jenkinsfile", "azure-pipelines.yml"),
        *("bitbucket-pipelines.yml", ".replit", ".gitpod.yml", "devfile.yaml"),
        *("flake.nix", "flake.lock", "shell.nix", "devenv.nix", "devenv.yaml"),
    )
)
"""Files that agents and build servers obey: their changes are reported."""
OBEYED_FOLDERS = frozenset((".github", ".gitlab", ".circleci", ".buildkite", ".forgejo", ".gitea"))
GIT_FOLDER = frozenset(("HEAD", "objects", "refs", "commondir"))
"""Entries by which Git recognises a repository: HEAD, with objects and refs or with commondir."""
GIT_SIGN = "HEAD"
"""The one of these entries that every repository has."""
SIGNS = GIT_FOLDER | {ENVIRONMENT}
"""Names that make their folder a repository or an environment."""
SIGNS_OF_FILES = SIGNS - {"objects", "refs"}
"""The files among `SIGNS`. Every repository and every environment has one of them."""
GIT_EXECUTES = (
    *("config", "config.worktree", "hooks", "info", "HEAD", "commondir", "modules", "worktrees"),
)
"""Entries of a repository that can name programs, or another folder with such entries."""
HOOKS = (
    *("applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit"),
    *("prepare-commit-msg", "commit-msg", "post-commit", "pre-rebase", "post-checkout"),
    *("post-merge", "pre-push", "pre-receive", "update", "proc-receive", "post-receive"),
    *("post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc"),
    *("post-rewrite", "sendemail-validate", "fsmonitor-watchman", "p4-changelist"),
    *("p4-prepare-changelist", "p4-post-changelist", "p4-pre-submit", "post-index-change"),
)
"""Names of hooks, from githooks(5)."""
SCRIPTS = (
    *(".py", ".sh", ".bash", ".zsh", ".fish", ".js", ".mjs", ".cjs", ".ts", ".mts", ".rb", ".pl"),
    *(".php", ".lua", ".ps1", ".r", ".jl", ".tcl", ".awk", ".groovy", ".exs", ".cmd", ".bat"),
)
"""Suffixes of files that interpreters run."""
