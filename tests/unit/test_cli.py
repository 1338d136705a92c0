"""The command line: what it prints, what it exits with, and what it leaves unimported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from kernel_mcp import __version__, cli
from kernel_mcp.config.settings import OPTIONS, Settings
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.linux.shutdown import Shutdown
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.units import GIB


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_names_every_flag_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert option.flag in text
        assert option.default in " ".join(text.split())
    assert "kernel-mcp doctor" in text
    assert "KERNEL_MCP_IDLE_TIMEOUT" in text


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ("doctor", ("--json", "--sandbox", "--allow", "--cache-dir"), ("--wait", "--audit-log")),
        ("env", ("list", "build", "prune"), ("--allow NAMES",)),
        ("env list", ("--cache-dir",), ("--allow", "--wait")),
        ("env build", ("--allow", "--python", "--offline"), ("--wait", "--older-than")),
        ("env prune", ("--older-than", "--cache-dir"), ("--allow",)),
        ("image", ("build",), ("--allow",)),
        ("image build", ("--engine", "--from", "--container-image"), ("--allow", "--memory")),
    ],
)
def test_the_help_of_a_command_has_its_own_flags(
    command: str,
    own: tuple[str, ...],
    others: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code = cli.main([*command.split(), "--help"])
    except SystemExit as end:
        code = int(end.code or 0)
    text = capsys.readouterr().out
    assert code == 0
    assert text.startswith(f"usage: kernel-mcp {command}")
    for word in own:
        assert word in text
    for word in others:
        assert word not in text


def test_a_command_takes_the_other_flags_of_a_server_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "env",
        "list",
        "--cache-dir",
        str(tmp_path / "c"),
        "--memory",
        "4G",
        "--sandbox",
        "none",
    ]
    assert cli.main(words) == 0
    downloads = tmp_path / "c" / "uv-cache"
    assert f"0 environments, 0 MiB; 0 MiB of downloads in {downloads}" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--version", "version", "-v", "-V"])
def test_version_is_the_package_version(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([words])
    assert capsys.readouterr().out == f"kernel-mcp {__version__}\n"


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "env"]) == 0
    assert capsys.readouterr().out.startswith("usage: kernel-mcp env list|build|prune")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_leave_the_heavy_libraries_alone(flag: str) -> None:
    code = (
        "import sys\n"
        "from kernel_mcp.cli import main\n"
        f"try: main([{flag!r}])\n"
        "except SystemExit: pass\n"
        "heavy = {'mcp', 'zmq', 'anyio', 'jupyter_client', 'pydantic', 'packaging'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--memroy", "2G"], "there is no flag --memroy; did you mean --memory?"),
        (["--memroy=2G"], "there is no flag --memroy=2G; did you mean --memory?"),
        (["doctr"], "there is no command doctr; did you mean doctor?"),
        (["--memory", "2X"], "--memory 2X: expected a size such as 512M or 2G (0 for no limit)"),
        (["--timeout", "-5"], "--timeout -5: expected a time"),
        (["--memory"], "argument --memory: expected one argument"),
        (["--mem", "2G"], "there is no flag --mem"),
        (["--allow", "./x"], "names a place"),
        (["--strict"], "there is no flag --strict any more: --profile strict is what it was"),
        (["--allow-weaker-sandbox"], "any more: --sandbox bwrap,landlock is what it was"),
        (["--install-timeout=1m"], "--install-timeout=1m any more: an installation has five min"),
        (["--hibernate-sessions", "9"], "any more: --quota asleep=N bounds hibernated sessions"),
        (
            ["--profile", "data"],
            "or default; there is no data any more: name packages with --allow",
        ),
        (["--port", "8000"], "no flag --port: --http 127.0.0.1:8000 serves MCP over HTTP"),
        (["--transport=stdio"], "without it, MCP is on stdin and stdout"),
        (["stdio"], "there is no command stdio: --http"),
        (["--verbose"], "--log-level debug reports more"),
        (["--nonsense"], "there is no flag --nonsense; did you mean --tokens?\n"),
        (["--config", "/"], "--config /: it is no ordinary file"),
        (["--sandbox", "auto,landlock"], "auto stands alone; what may follow each other is bwrap,"),
        (["--profile", "lax"], "--profile lax: expected strict, guarded or default"),
        (["env"], "expected one of list, build, prune"),
        (["env", "prune", "--older-than", "soon"], "--older-than soon: expected a time"),
    ],
)
def test_a_wrong_command_line_gets_one_clear_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kernel-mcp: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def _replace_server(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[Settings, Future[Sandbox], Shutdown], int]
) -> None:
    server = ModuleType("kernel_mcp.start")
    server.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernel_mcp.start", server)


def test_settings_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, _sandbox: Future[Sandbox], _ending: Shutdown) -> int:
        seen.append(settings)
        return 7

    _replace_server(monkeypatch, serve)
    code = cli.main(["--allow", "numpy,os", "--allow", "pandas", "--memory", "4G", "--cpu", "2m"])
    assert code == 7
    assert seen[0].allow == ("numpy", "os", "pandas")
    assert seen[0].limits.memory_bytes == 4 * GIB
    assert seen[0].limits.cpu_seconds == 120


def test_whoever_types_the_command_is_told_that_a_client_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _replace_server(monkeypatch, lambda _settings, _sandbox, _ending: 0)
    assert cli.main(["--sandbox", "none"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["--sandbox", "none"]) == 0
    assert "a client starts this command" in capsys.readouterr().err


def test_a_switch_takes_no_value_and_sandboxes_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, _sandbox: Future[Sandbox], _ending: Shutdown) -> int:
        seen.append(settings)
        return 0

    _replace_server(monkeypatch, serve)
    assert cli.main(["--sandbox", "landlock, bwrap", "--no-template", "--warm", "0"]) == 0
    assert seen[0].sandbox == ("landlock", "bwrap")
    assert seen[0].no_template


def test_flags_for_lists_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, _sandbox: Future[Sandbox], _ending: Shutdown) -> int:
        seen.append(settings)
        return 0

    _replace_server(monkeypatch, serve)
    flags = ["--sandbox", "none", "--allow-install", "a,b", "--allow-install", "c", "--offline"]
    assert cli.main([*flags, "--find-links", "/a", "--find-links", "/b"]) == 0
    assert seen[0].allow_install == ("a", "b", "c")
    assert seen[0].find_links == ("/a", "/b")
    assert seen[0].offline


def test_a_failure_the_server_explains_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(settings: Settings, _sandbox: Future[Sandbox], _ending: Shutdown) -> int:
        raise EnvironmentBuildError("no network. Do this.")

    _replace_server(monkeypatch, serve)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "kernel-mcp: error: no network. Do this.\n"


def test_a_signal_while_a_class_is_made_ends_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Part:
        def __set_name__(self, _owner: type, _name: str) -> None:
            raise SystemExit(7)  # as what a signal is handled by, which may come at any moment

    def serve(_words: object) -> int:
        type("Whole", (), {"part": Part()})
        return 0

    monkeypatch.setattr(cli, "_serve", serve)
    with pytest.raises(SystemExit) as raised:
        cli.main([])
    assert raised.value.code == 7


def test_ctrl_c_while_a_class_is_made_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(_words: object) -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(cli, "_serve", serve)
    assert cli.main([]) == 130


def test_an_error_while_a_class_is_made_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(_words: object) -> int:
        raise RuntimeError("of another kind") from ValueError("why")

    monkeypatch.setattr(cli, "_serve", serve)
    with pytest.raises(RuntimeError, match="another kind"):
        cli.main([])


def test_what_a_found_file_may_not_set_is_said_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    (tmp_path / "kernel-mcp.toml").write_text('cache-dir = "c"\nallow = "numpy"\nwarm = 1\n')
    assert cli.main(["env", "list"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("kernel-mcp: warning: cache-dir, allow in ")
    assert said.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("argparse", "gc", "tomli", "platformdirs", "mcp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')\n")
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "env", "list", "--cache-dir", str(tmp_path / "c")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("closing", "name"), [("<&-", "stdin"), (">&-", "stdout")])
def test_a_closed_stream_is_told_in_a_sentence(closing: str, name: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m kernel_mcp {closing}"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"kernel-mcp: error: {name} cannot be used")
    assert done.stderr.count("\n") == 1
