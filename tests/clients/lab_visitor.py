"""A person in JupyterLab beside an agent, in a real browser; run by `test_lab` with its own Python.

lab_visitor.py CHROMIUM FOLDER; prints what was seen as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client
from playwright.async_api import Page, async_playwright
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

CANARY = "http://127.0.0.1:9/canary"
HOSTILE = rf"""
from IPython.display import HTML, Javascript, Latex, Markdown, SVG, display
display(HTML('''words<script>window.pwned=1;fetch("{CANARY}")</script>
<img src="{CANARY}" onerror="window.pwned=2"><iframe src="{CANARY}"></iframe>
<form action="{CANARY}"><button>go</button></form>
<style>@import url({CANARY}); body {{ display: none }}</style>
<a href="javascript:window.pwned=3">link</a>'''))
display(HTML('''<table onclick="window.pwned=4"><tr>
<td style="background:url({CANARY})" colspan=2>in a cell<script>window.pwned=5</script>
&lt;img src=x onerror=window.pwned=6&gt;</td></tr></table>'''))
display(Javascript("window.pwned=7"))
drawing = '<svg xmlns="http://www.w3.org/2000/svg" onload="window.pwned=8">'
display(SVG(drawing + "<script>window.pwned=9</script></svg>"))
display(Markdown("<img src=x onerror=window.pwned=10> ![picture]({CANARY})"))
display(Latex(r"$\href{{javascript:window.pwned=11}}{{link}}$"))
widget = "application/vnd.jupyter.widget-view+json"
display({{widget: {{"model_id": "1"}}, "text/plain": "widget"}}, raw=True)
vega = {{"data": {{"url": "{CANARY}"}}, "mark": "bar"}}
display({{"application/vnd.vegalite.v5+json": vega}}, raw=True)
display({{"image/png": '" onerror="window.pwned=12', "text/plain": "no picture"}}, raw=True)
print("<script>window.pwned=13</script>\x1b]8;;javascript:window.pwned=14\x1b\\link\x1b]8;;\x1b\\")
class Repr:
    def __repr__(self): return "<img src=x onerror=window.pwned=15>"
display(Repr(), metadata={{"trusted": True, "text/html": {{"trusted": True}}}})
raise ValueError("<img src=x onerror=window.pwned=16>")
"""
SEEN_WORDS = ("in a cell", "widget", "no picture", "<img src=x onerror=window.pwned=15>")
LINES = "import time\nfor n in range(40):\n    print('line', n, flush=True)\n    time.sleep(0.1)"
CLEARED = """
from IPython.display import clear_output, display, update_display
display("of the display", display_id="d")
clear_output()
print("kept line")
update_display("elsewhere", display_id="d")
for n in range(600):
    display(n)
"""
RESTARTS = ("kernelmenu:restart", "kernelmenu:restart-and-clear", "runmenu:restart-and-run-all")
"""Of the menus; those of the toolbar, the keys and the palette do the same."""
FOREVER = "import time\nwhile True: time.sleep(0.05)"


Serving = Callable[[], AbstractAsyncContextManager["Agent"]]


class Agent:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def run(self, code: str, **options: Any) -> str:
        answer = await self._client.call_tool("execute", {"code": code, **options})
        return "\n".join(each.text for each in answer.content if each.type == "text")


async def notebook(page: Page) -> str:
    return str(await page.inner_text(".jp-Notebook"))


async def until(page: Page, words: str) -> None:
    await page.wait_for_function(
        "words => document.querySelector('.jp-Notebook')?.innerText.includes(words)", arg=words
    )


async def run_as_person(page: Page, code: str) -> None:
    """Type into a new cell at the end and run it."""
    cells = page.locator(".jp-Notebook .jp-Cell")
    before = await cells.count()
    await page.click(".jp-Notebook-footer")
    await page.wait_for_function(
        "n => document.querySelectorAll('.jp-Notebook .jp-Cell').length > n", arg=before
    )
    editor = cells.last.locator(".cm-content")
    await editor.click()
    await editor.fill(code)
    await page.keyboard.press("Shift+Enter")


async def refused(page: Page, method: str, path: str, body: dict[str, Any]) -> int:
    """The status of a request of JupyterLab's own page."""
    status: int = await page.evaluate(
        """async ([method, path, body]) => {
            const token = document.cookie.match(/_xsrf=([^;]*)/)[1];
            const sent = { method, headers: { "X-XSRFToken": token } };
            if (method !== "GET") sent.body = JSON.stringify(body);
            return (await fetch(path, sent)).status;
        }""",
        [method, path, body],
    )
    return status


async def refused_restarts(page: Page) -> list[str]:
    """Return the page's message for each way to restart the kernel."""
    said = []
    for command in RESTARTS:
        menu = "Run" if command.startswith("run") else "Kernel"
        await page.click(f".lm-MenuBar-item >> text={menu}")
        await page.click(f".lm-Menu-item[data-command='{command}']")
        dialog = page.locator(".jp-Dialog")
        said.append(await dialog.inner_text())
        await page.click(".jp-Dialog .jp-mod-accept")
        await dialog.wait_for(state="detached")
    return said


async def visit(agent: Agent, page: Page, seen: dict[str, Any], folder: Path) -> None:
    await page.wait_for_selector(".jp-DirListing-item")
    seen["listed"] = await page.inner_text(".jp-DirListing-item .jp-DirListing-itemText")
    await page.dblclick(".jp-DirListing-item")
    await until(page, "before 41")
    await page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")

    going = asyncio.create_task(agent.run(LINES))
    await until(page, "line 3")
    seen["while it runs"] = "line 39" not in await notebook(page)
    await going
    await until(page, "line 39")

    await run_as_person(page, "x += 1\nprint('person', x)")
    await until(page, "person 42")
    seen["answer"] = await agent.run("x")
    await until(page, "[4]:\n42")

    await run_as_person(page, FOREVER)
    await page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=busy]")
    queued = asyncio.create_task(agent.run("'after the person'"))
    await page.click("[data-command='notebook:interrupt-kernel']")
    seen["queued"] = await queued
    await until(page, "KeyboardInterrupt")
    await until(page, "'after the person'")

    seen["refusals"] = await refused_restarts(page)
    seen["after refusals"] = await notebook(page)
    seen["next"] = await agent.run("get_ipython().execution_count")

    first = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    await first.click()
    await page.keyboard.press("Control+a")
    await page.keyboard.insert_text("print('edited', x)")
    await page.keyboard.press("Shift+Enter")
    await until(page, "edited 42")
    await page.screenshot(path=str(folder / "lab.png"))

    await agent.run(HOSTILE)
    await until(page, "window.pwned=16")
    await run_as_person(page, HOSTILE)
    await page.wait_for_function(
        "() => document.querySelector('.jp-Notebook').innerText.split('Error: <img').length > 2"
    )
    await page.evaluate("() => new Promise(resolve => setTimeout(resolve, 1000))")  # to be run
    await page.screenshot(path=str(folder / "hostile.png"))
    text = await notebook(page)
    seen["words"] = [text.count(words) >= 2 for words in SEEN_WORDS]
    seen["tables"] = await page.locator(".jp-OutputArea td[colspan='2']").count()
    seen["pwned"] = await page.evaluate("window.pwned ?? null")
    seen["elements"] = await page.locator(
        ".jp-OutputArea-output :is(script, iframe, form, style, a[href^=javascript], svg)"
    ).count()
    seen["frames"] = len(page.frames)

    seen["statuses"] = {
        "terminal": await refused(page, "POST", "/api/terminals", {}),
        "kernel": await refused(page, "POST", "/api/kernels", {"name": "python3"}),
        "upload": await refused(
            page,
            "PUT",
            "/api/contents/a.html",
            {"type": "file", "format": "text", "content": "<script></script>"},
        ),
        "new": await refused(page, "POST", "/api/contents", {"type": "file"}),
        "file": await refused(page, "GET", "/files/etc/passwd", {}),
        "beside": await refused(page, "GET", "/kernelspecs/python3/beside.html", {}),
        "export": await refused(page, "GET", "/nbconvert/html/a.ipynb", {}),
        "build": await refused(page, "POST", "/lab/api/build", {}),
        "plugins": await refused(
            page,
            "POST",
            "/lab/api/plugins",
            {"cmd": "enable", "plugin_name": "@jupyterlab/terminal-extension"},
        ),
        "restart": await refused(page, "POST", f"/api/kernels/{await kernel(page)}/restart", {}),
        "shutdown": await refused(page, "DELETE", f"/api/kernels/{await kernel(page)}", {}),
    }
    seen["alive"] = await agent.run("x")

    await agent.run(CLEARED)
    saved = ""
    while "more outputs are in the session" not in saved:
        saved = await page.evaluate(
            "name => fetch(`/api/contents/${name}?content=1`).then(answer => answer.text())",
            seen["listed"],
        )
    seen["kept line"] = "kept line" in saved


async def comes_back(server: Serving, page: Page, seen: dict[str, Any]) -> None:
    """Look at a session whose server is replaced by another."""
    async with server() as agent:
        await agent.run("y = 5\nprint('first', y)")
        item = ".jp-DirListing-item >> nth=0"
        await page.wait_for_selector(item)
        await page.dblclick(item)
        await until(page, "first 5")
        await page.wait_for_selector("text=kernel-mcp session | Idle")
    async with server() as agent:
        await agent.run("print('second', y)")
        await until(page, "second 5")
        await page.wait_for_selector("text=kernel-mcp session | Idle")
        await run_as_person(page, "y += 1\nprint('person', y)")
        await until(page, "person 6")
        seen["back"] = await agent.run("y")
        await until(page, "[4]:\n6")


async def foreign(address: str) -> int:
    """The status of a shared document for a page of another server that has the token."""
    place, _, token = address.partition("/lab?token=")
    room = f"{place.replace('http', 'ws')}/api/collaboration/room/JupyterLab:globalAwareness"
    headers = {"Authorization": f"token {token}", "Origin": "http://127.0.0.1:1"}
    try:
        (await websocket_connect(HTTPRequest(room, headers=headers))).close()
    except HTTPClientError as error:
        return error.code
    return 101


async def read_without_page(address: str) -> None:
    """Read a followed notebook that no page has open."""
    place, _, token = address.partition("/lab?token=")

    async def get(path: str) -> Any:
        headers = {"Authorization": f"token {token}"}
        answer = await AsyncHTTPClient().fetch(HTTPRequest(place + path, headers=headers))
        return json.loads(answer.body)

    name = (await get("/api/contents"))["content"][0]["path"]
    assert (await get(f"/api/contents/{name}?content=1"))["content"]["cells"]


async def kernel(page: Page) -> str:
    found: str = await page.evaluate(
        "fetch('/api/kernels').then(r => r.json()).then(k => k[0]?.id ?? 'none')"
    )
    return found


@asynccontextmanager
async def lab_and_page(
    browser: str, state: Path, folder: Path, seen: dict[str, Any]
) -> AsyncIterator[tuple[str, Page]]:
    """JupyterLab's address, and a page that notes what leaves it."""
    command = [sys.executable, "-m", "kernel_mcp", "lab", "--state-dir", str(state)]
    lab = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "JUPYTER_TOKEN": "known"},
    )
    assert lab.stdout is not None
    line = (await lab.stdout.readline()).decode()
    address = re.findall(r"http://127\.0\.0\.1:\d+/lab\?token=\w{20,}", line)[0]
    origin = address.partition("/lab")[0]

    def note(url: str) -> None:
        if not url.startswith((origin, "data:", "blob:")):
            seen["requests"].append(url)

    async def dismiss(dialog: Any) -> None:
        seen["dialogs"] += 1
        await dialog.dismiss()

    async with async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = await chromium.new_page(viewport={"width": 1300, "height": 900})
        page.set_default_timeout(60_000)
        page.on("request", lambda request: note(request.url))
        page.on("dialog", dismiss)
        try:
            yield address, page
        finally:
            await page.screenshot(path=str(folder / "last.png"))
            await chromium.close()
            lab.terminate()
            seen["end"] = await asyncio.wait_for(lab.wait(), 60)


async def main(browser: str, folder: Path) -> None:
    state, kept, project = folder / "s", folder / "k", folder / "project"
    for each in (state, kept, project):
        each.mkdir()
    (folder / "beside.html").write_text("<script src=beside.js></script>")
    seen: dict[str, Any] = {"dialogs": 0, "requests": []}

    @asynccontextmanager
    async def serving(place: Path, persist: str) -> AsyncIterator[Agent]:
        flags = ["--state-dir", str(place), "--persist", persist, "--allow", "*"]
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "kernel_mcp", *flags],
            env=dict(os.environ),
            cwd=str(project),
        )
        async with Client(server) as client:
            yield Agent(client)

    async with serving(state, "off") as agent:
        await agent.run("x = 41\nprint('before', x)")
        async with lab_and_page(browser, state, folder, seen) as (address, page):
            seen["foreign"] = await foreign(address)
            await read_without_page(address)
            await page.goto(address)
            await visit(agent, page, seen, folder)
    async with lab_and_page(browser, kept, folder, seen) as (address, page):
        await page.goto(address)
        await comes_back(lambda: serving(kept, "1G,1d"), page, seen)
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
