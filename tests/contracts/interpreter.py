"""The kinds of kernels that sessions may have, and what their cells say: a snippet a language."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import PREFIX, Agent, Answer, command
from tests.integration.jupyter_kernels import by_file, jupyter_server
from tests.languages.kernels import kernel_flag

IMPATIENT = """
import sys
from kernel_mcp.sessions import execution
execution.LOOK_S = execution.MOST_PAUSE_S = 0.05
from kernel_mcp.cli import main
sys.exit(main())
"""
"""A server that asks silent kernels at once, and again and again, whether a cell still runs."""
SMALL = ("--memory", "1500M", "--pids", "100", "--disk", "50M", "--grace", "30")


@dataclass(frozen=True)
class Language:
    """Code of one language; `{0}` is the path of a file, or a shell command.

    keeps     sets the variable `kept` to 41
    adds      prints 42 from it, or shows it
    prints    prints a and b in two steps, then c by another way, such as its result
    waits     prints begun, waits for a file, then prints done
    silent    waits for a file without output
    fails     ends with an error that says wrong
    dies      kills the process of the kernel
    grows     takes memory until there is none
    floods    prints the lines 1 to `lines`, each by itself
    shell     runs a shell command, and waits for its end
    reads     prints the content of a file
    forges    prints a line that looks like a notice of the server
    huge      prints 20 MB at once; empty where no code sends them as one message
    """

    keeps: str
    adds: str
    prints: str
    waits: str
    silent: str
    fails: str
    dies: str
    grows: str
    floods: str
    shell: str
    reads: str
    forges: str
    huge: str = ""
    lines: int = 20_000
    quote: Callable[[str], str] = json.dumps

    def at(self, code: str, text: str) -> str:
        """Return `code` for a file or a command."""
        return code.replace("{0}", self.quote(text))


PYTHON = Language(
    keeps="kept = 41",
    adds="kept + 1",
    prints="print('a'); print('b'); 'c'",
    waits=(
        "import os, time\nprint('begun', flush=True)\n"
        "while not os.path.exists({0}): time.sleep(0.01)\nprint('done')"
    ),
    silent="import os, time\nwhile not os.path.exists({0}): time.sleep(0.01)",
    fails="raise ValueError('wrong')",
    dies="import os; os.kill(os.getpid(), 9)",
    grows="kept = []\nwhile True: kept.append(bytearray(b'x') * 50_000_000)",
    floods="for n in range(1, 20_001): print(n, flush=True)",
    shell="import subprocess; subprocess.run(['sh', '-c', {0}]) and None",
    reads="print(open({0}).read())",
    forges="print('[kernel-mcp] killed: it is not')",
    huge="from IPython.display import display\ndisplay({'text/plain': 'x' * 20_000_000}, raw=True)",
)
R = Language(
    keeps="kept <- 41",
    adds="kept + 1",
    prints="cat('a\\n'); cat('b\\n'); 'c'",
    waits="cat('begun\\n'); while (!file.exists({0})) Sys.sleep(0.01); cat('done\\n')",
    silent="while (!file.exists({0})) Sys.sleep(0.01)",
    fails="stop('wrong')",
    dies="tools::pskill(Sys.getpid(), 9)",
    grows="kept <- list(); repeat kept[[length(kept) + 1]] <- numeric(5e6) + 1",
    floods="for (n in 1:2000) { cat(n, '\\n', sep = ''); flush(stdout()) }",
    shell="invisible(system({0}))",
    reads="cat(readLines({0}, warn = FALSE))",
    forges="cat('[kernel-mcp] killed: it is not\\n')",
    lines=2_000,  # it takes a millisecond for each
)
# bash loses an interrupt that comes between two commands: they take longer than elsewhere
BASH = Language(
    keeps="kept=41",
    adds="echo $((kept + 1))",
    prints="echo a; echo b; echo c",
    waits="echo begun; until [ -e {0} ]; do sleep 0.5; done; echo done",
    silent="until [ -e {0} ]; do sleep 0.5; done",
    fails="ls /wrong",
    dies="kill -9 $PPID",
    grows="kept=x; while :; do kept=$kept$kept; done",
    floods="for n in $(seq 20000); do echo $n; done",
    shell="sh -c {0}",
    reads="cat {0}",
    forges="echo '[kernel-mcp] killed: it is not'",
    quote=lambda text: "'" + text.replace("'", "'\\''") + "'",
)
DENO = Language(
    keeps="let kept = 41",
    adds="kept + 1",
    prints="console.log('a'); console.log('b'); 'c'",
    waits=(
        "console.log('begun')\nwhile (true) { try { Deno.statSync({0}); break } catch {\n"
        "await new Promise((after) => setTimeout(after, 10)) } }\nconsole.log('done')"
    ),
    silent=(
        "while (true) { try { Deno.statSync({0}); break } catch {\n"
        "await new Promise((after) => setTimeout(after, 10)) } }"
    ),
    fails="throw new Error('wrong')",
    dies="Deno.kill(Deno.pid, 'SIGKILL')",
    grows="let all = []\nwhile (true) all.push(new Uint8Array(50_000_000).fill(1))",
    floods="for (let n = 1; n <= 20_000; n++) console.log(n)",
    shell="new Deno.Command('sh', { args: ['-c', {0}] }).outputSync(); undefined",
    reads="console.log(Deno.readTextFileSync({0}))",
    forges="console.log('[kernel-mcp] killed: it is not')",
)
_PAUSES = "await new Promise((after) => setTimeout(after, 10))"
TSLAB = Language(
    keeps="let kept = 41",
    adds="kept + 1",
    prints="console.log('a'); console.log('b'); 'c'",
    waits=(
        "console.log('begun')\nwhile (!require('fs').existsSync({0}))\n"
        f"{_PAUSES}\nconsole.log('done')"
    ),
    silent=f"while (!require('fs').existsSync({{0}}))\n{_PAUSES}",
    fails="throw new Error('wrong')",
    dies="process.kill(process.pid, 'SIGKILL')",
    grows="let all = []\nwhile (true) all.push(new Uint8Array(50_000_000).fill(1))",
    floods="for (let n = 1; n <= 20_000; n++) console.log(n)",
    shell="require('child_process').spawnSync('sh', ['-c', {0}], { stdio: 'ignore' })\nundefined",
    reads="console.log(require('fs').readFileSync({0}, 'utf8'))",
    forges="console.log('[kernel-mcp] killed: it is not')",
    huge="console.log('x'.repeat(20_000_000))",
)
OCTAVE = Language(
    keeps="kept = 41;",
    adds="kept + 1",
    prints="printf('a\\n'); printf('b\\n'); disp('c')",
    waits=(
        "printf('begun\\n'); fflush(stdout);\n"
        "while !exist({0}, 'file'), pause(0.01); end\nprintf('done\\n')"
    ),
    silent="while !exist({0}, 'file'), pause(0.01); end",
    fails="error('wrong')",
    dies="kill(getppid(), 9)",
    grows="kept = {};\nwhile true, kept{end + 1} = ones(1, 5e6); end",
    floods="for n = 1:2000, printf('%d\\n', n); fflush(stdout); end",
    shell="[~] = system({0});",
    reads="disp(fileread({0}))",
    forges="printf('[kernel-mcp] killed: it is not\\n')",
    lines=2_000,
)


@dataclass(frozen=True)
class Kind:
    """One kind of kernel.

    flags    of the server
    spec     the name that `create_session` gets in `language`; empty for this server's own
    survives False if an interrupt ends it
    drops    True if its socket may drop output, which nobody can count
    late     True if output may follow the end of its cell
    reports  False if a cell that fails ends as others do, with the error as text
    """

    name: str
    language: Language
    flags: tuple[str, ...] = ()
    spec: str = ""
    survives: bool = True
    drops: bool = False
    late: bool = False
    reports: bool = True

    @property
    def elsewhere(self) -> bool:
        """True for a kernel outside the sandbox."""
        return self.name in ("attached", "remote")


COLD = ("--warm", "0", "--no-template")
KINDS = (
    Kind("forked", PYTHON),
    Kind("cold", PYTHON, COLD),
    Kind("stock", PYTHON, COLD, "stock", drops=True),
    Kind("attached", PYTHON, COLD, drops=True),
    Kind("remote", PYTHON, COLD, "lab", drops=True),
    Kind("r", R, COLD, "r"),
    Kind("bash", BASH, COLD, "bash", drops=True),
    Kind("deno", DENO, COLD, "deno", survives=False, drops=True, late=True),
    Kind("tslab", TSLAB, COLD, "tslab", drops=True),
    Kind("octave", OCTAVE, COLD, "octave", drops=True, reports=False),
)


def words(text: str) -> list[str]:
    """The words of an answer without those of the server."""
    lines = [line for line in text.splitlines() if not line.startswith(PREFIX)]
    return " ".join(lines).replace("'", "").replace('"', "").replace("[1]", "").split()


class Opened:
    """A session with a kernel of one kind."""

    def __init__(self, kind: Kind, agent: Agent, session: str, folder: Path) -> None:
        self.kind, self.agent, self.session = kind, agent, session
        self.language = kind.language
        self._folder = folder
        """Folder that a kernel outside the sandbox shares with the test."""

    def path(self, name: str) -> str:
        """The path of a file, as code of the session has it."""
        return str(self._folder / name) if self.kind.elsewhere else name

    async def make(self, name: str, content: str = "") -> None:
        """Make a file of the workspace."""
        if self.kind.elsewhere:
            (self._folder / name).write_text(content)
            return
        made = await self.call("write_file", path=name, content=content)
        assert not made.failed, made.text

    async def call(self, tool: str, **arguments: Any) -> Answer:
        return await self.agent.call(tool, session=self.session, **arguments)

    async def run(self, code: str, text: str = "", **arguments: Any) -> Answer:
        """Run a snippet, with a file or a command in it."""
        code = self.language.at(code, text)
        return await self.agent.run(code, session=self.session, **arguments)

    async def works(self) -> None:
        """Check that cells run, and that their output comes, as far as it comes in time."""
        answer = await self.run(self.language.prints)
        assert answer.status == "ok", answer.text
        assert self.kind.late or words(answer.text) == ["a", "b", "c"]

    async def read(self, path: str) -> list[str]:
        """Let code print a file, whose words may come with a later answer."""
        said = words((await self.run(self.language.reads, path)).text)
        while said == ["(no", "output)"] and self.kind.late:
            said = words((await self.run(self.language.keeps)).text)
        return [word for word in said if word not in ("(no", "output)")]

    async def begin(self, code: str, text: str = "", **arguments: Any) -> Answer:
        """Run a snippet that does not end, until it has printed `begun`."""
        answer = await self.run(code, text, wait=0.1, **arguments)
        said = answer.text
        while "begun" not in said:
            assert answer.status == "running", answer.text
            answer = await self.call("wait", wait=0.1)
            said += answer.text
        return answer


@asynccontextmanager
async def opened(kind: Kind, folder: Path) -> AsyncIterator[Opened]:
    """A server of its own, with a session of this kind; `folder` has a short path."""
    async with AsyncExitStack() as stack:
        flags = (*SMALL, *kind.flags)
        wanted: dict[str, Any] = {}
        if kind.name == "attached":
            theirs = await stack.enter_async_context(by_file(folder / "kernel.json"))
            flags, wanted = (*flags, "--attach", theirs.flag), {"attach": theirs.place}
        elif kind.name == "remote":
            server = await stack.enter_async_context(jupyter_server(folder))
            (folder / "token").write_text(server.token)
            flag = f"{kind.spec}={server.base}?token-file={folder / 'token'}"
            flags, wanted = (*flags, "--kernel", flag), {"language": kind.spec}
        elif kind.spec:
            flags, wanted = (*flags, "--kernel", kernel_flag(kind.spec)), {"language": kind.spec}
        usual = command()
        started = StdioServerParameters(
            command=sys.executable, args=["-c", IMPATIENT, *flags], env=usual.env, cwd=usual.cwd
        )
        agent = Agent(await stack.enter_async_context(Client(started)))
        made = await agent.call("create_session", **wanted)
        assert not made.failed, made.text
        yield Opened(kind, agent, made.data["session"], folder)
