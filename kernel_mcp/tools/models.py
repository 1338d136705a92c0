"""Structured tool results. Some clients show only these, so each holds every word a model needs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    """Has its fields and no others, as its schema says."""

    model_config = ConfigDict(extra="forbid")


class ResultWithNotices(Result):
    """A result that may have something to tell besides."""

    notices: list[str] = Field(default=[], description="What the server has to tell besides")


class SessionHandle(ResultWithNotices):
    """A session that can be used from now on."""

    session: str = Field(description="Handle to pass as `session` in other tools")
    name: str
    note: str


class SessionState(ResultWithNotices):
    """One session as `list_sessions` shows it. Times are seconds."""

    session: str
    name: str
    state: str = Field(description="new, idle, busy or hibernated")
    age_s: float
    idle_s: float
    memory_mb: float
    python: str
    language: str | None = Field(default=None, description="If it is another than Python")
    cells: int
    queued: int
    running_cell: int | None = Field(default=None, description="Number of the running cell")
    running_s: float | None = Field(default=None, description="How long it has been running")
    last_cell: str = Field(description="First line and status of the last cell")
    branch_of: str = Field(default="", description="Of a branch, the session it came of")
    lost: list[str] = Field(default=[], description="Variables that `notices` call lost")


class SessionList(ResultWithNotices):
    """The caller's sessions, oldest first."""

    sessions: list[SessionState]
    limit: int


class Closed(ResultWithNotices):
    """A session that has ended."""

    session: str
    note: str


class Undone(ResultWithNotices):
    """Where a session went back to."""

    session: str
    state_as_of: int | None = Field(
        default=None, description="The last cell whose work the variables hold"
    )
    gone: list[int] = Field(description="Cells whose work is gone")
    lost: list[str] = Field(description="Names that are defined no more")
    note: str


class BranchHandle(Result):
    """A branch of a session."""

    session: str = Field(description="Handle to pass as `session` in other tools")
    folder: str = Field(description="Its own folder in the workspace")


class Branched(ResultWithNotices):
    """Sessions that go on from one moment."""

    session: str
    branches: list[BranchHandle]
    note: str


class Adopted(ResultWithNotices):
    """The session that goes on with what a branch has."""

    session: str
    gone: list[int] = Field(description="Cells of the session whose work is gone")
    note: str


class DiagnosticModel(Result):
    """One finding of `check_syntax`; lines and columns count from 1."""

    severity: str
    kind: str
    message: str
    line: int
    column: int
    source_line: str


class ImportModel(Result):
    """One module the code imports."""

    name: str
    line: int
    allowed: bool


class SyntaxReport(ResultWithNotices):
    """Result of `check_syntax`. `valid` is False when `execute` would refuse the code."""

    session: str
    valid: bool
    diagnostics: list[DiagnosticModel]
    imports: list[ImportModel]
    summary: str


class FileEntry(Result):
    """One file or folder of a workspace. Size in bytes, modification time in ISO 8601."""

    path: str
    kind: str
    size: int
    modified: str


class FileList(ResultWithNotices):
    """A folder of the workspace."""

    session: str
    path: str
    entries: list[FileEntry]
    omitted: int = Field(default=0, description="Number of entries that are not in `entries`")
    note: str = ""


class Written(ResultWithNotices):
    """A file that was written."""

    session: str
    path: str
    size: int
    note: str


class LimitsModel(Result):
    """Limits of one kernel; 0 means no limit."""

    memory_mb: int
    cpu_s: float
    cpus: float
    processes: int
    disk_mb: int
    cell_timeout_s: float
    max_cell_timeout_s: float
    output_chars: int
    max_sessions: int
    idle_timeout_s: float


class ServerInfo(ResultWithNotices):
    """The server and the session's kernel environment."""

    session: str
    server_version: str
    python: str
    interpreter: str = Field(description="Path of the Python that runs code")
    uv_version: str = Field(description="Of the uv that builds environments and installs")
    platform: str
    environment: list[str] = Field(description="Of the operator's own environment or project")
    packages: list[str] = Field(description="What was asked for; list_packages has all")
    packages_more: int = Field(default=0, description="Number of those that came with them")
    listed_by: list[str] = Field(
        description="Files of the operator that list packages, as they were at the server's start"
    )
    policy: str = Field(description="The profile in force and what it lets code do")
    allowed_imports: list[str] = Field(description="['*'] for all that is installed")
    sandbox: str
    sandbox_enforces: list[str]
    sandbox_gaps: list[str]
    sandbox_found: list[str] = Field(
        description="how the session's kernel was started, and what was read of its process then"
    )
    kept: str = Field(description="What outlives the server, or why nothing does")
    checkpoints: str = Field(description="What the session goes back to when its kernel dies")
    audit_log: str = Field(description="on, off, or since when and why it fails")
    limits: LimitsModel
    workspace: str = Field(description="The own folder of the session, as code sees it")
    mounts: list[str] = Field(description="What code sees of the host, and what is covered in it")
    network: str = Field(description="Where code of the session may connect")
    tools: str = Field(
        default="none", description="Tool servers that code may call, which reach more"
    )
    devices: list[str] = Field(description="Devices of the host that code may use")
    gpus: list[str] = Field(
        description="Memory and use of the machine's GPUs now, all programs together, where code "
        "may use one"
    )
    variables: list[str] = Field(
        description="Names in os.environ from the operator; values are masked in outputs"
    )
    attach: list[str] = Field(description="Kernels of people that create_session may join")
    languages: list[str] = Field(
        default_factory=list, description="What create_session takes as `language`"
    )
    ignored_settings: str = Field(description="Settings that were not taken, and why")
    problem: str = Field(default="", description="Why no kernel can start; empty if one can")


class Variable(Result):
    """One variable of the session. Size in bytes where the object tells it."""

    name: str
    type: str
    shape: list[int] | None = None
    length: int | None = None
    size: int | None = None
    preview: str = ""


class VariableList(ResultWithNotices):
    """The session's variables by name."""

    session: str
    variables: list[Variable]
    omitted: int
    note: str = ""


class PackageState(Result):
    """One package of an installation."""

    name: str
    version: str
    previous: str = Field(description="Version it takes the place of; empty when there was none")
    requested: bool = Field(description="False for what others depend on")
    imports: list[str] = Field(description="Modules that were tried in the live session")
    state: str = Field(description="works, needs a reset, fails, ...")
    detail: str = ""


class Installed(ResultWithNotices):
    """Result of an installation, as the live session sees it."""

    session: str
    summary: str
    packages: list[PackageState]
    allowed_imports: list[str] = Field(description="Modules that code may import from now on")
    reset_needed: bool
    duration_s: float


class PackageEntry(Result):
    """One package a session can use."""

    name: str
    version: str
    source: str = Field(description="environment, or installed for packages that were added")


class PackageList(ResultWithNotices):
    """All packages of a session by name."""

    session: str
    python: str
    packages: list[PackageEntry]
    omitted: int = Field(default=0, description="Number of packages that are not in `packages`")
    note: str = ""
    installable: str = Field(description="What install may add")
