"""Output of every size and kind through a real client."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import anyio
import nbformat
import pytest

from tests.integration.agent import ANALYSIS, agent
from tests.integration.memory import forget_peak, server_pid, status_bytes
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]


async def test_progress_bars_show_their_last_state_and_escapes_vanish(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run(
            "for i in range(5): print(f'\\r{i * 25}%', end='')\n"
            "print()\nprint('\\x1b[31mred\\x1b[0m \\x07bell')"
        )
        assert answer.text.splitlines() == ["100%", "red bell"]


async def test_surrogates_and_bidi_controls_are_made_safe(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run("print('\\ud800 \\u202e abc')\n'\\ud800'")
        answer.text.encode("utf-8")
        assert "\u202e" not in answer.text


async def test_long_output_keeps_head_and_tail_and_the_whole_can_be_read(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run("for i in range(100_000): print('row', i)")
        assert len(answer.text) < 31_000
        assert answer.text.startswith("row 0\n")
        assert "row 99999" in answer.text
        whole = sum(len(f"row {i}\n") for i in range(100_000))
        shown = sum(len(line) + 1 for line in answer.text.splitlines() if line.startswith("row "))
        assert answer.cell["omitted"] == whole - shown
        uri = answer.links[0].uri
        content = (await notebook.client.read_resource(uri)).contents[0]
        assert len(content.text) == whole  # type: ignore[union-attr]
        page = await notebook.call("read_file", path=uri, offset=50_000, limit=2)
        assert page.text.startswith("row 50000\nrow 50001")


async def test_a_million_lines_arrive(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run("for i in range(10**6): print(i)")
        assert answer.status == "ok"
        assert "999999" in answer.text
        assert answer.cell["omitted"] > 6_000_000


@pytest.mark.ways
async def test_several_figures_of_one_cell_come_back_in_order(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run(
            "import matplotlib.pyplot as plt\n"
            "for n in range(3):\n    plt.figure()\n    plt.plot(range(n + 2))\n"
            "plt.show()"
        )
        assert len(answer.images) == 3


@pytest.mark.ways
async def test_a_large_picture_is_shrunk_and_its_original_kept(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run(
            "import numpy as np\nfrom PIL import Image\n"
            "rng = np.random.default_rng(1)\n"
            "Image.fromarray(rng.integers(0, 255, (1200, 1600, 3), dtype=np.uint8))"
        )
        assert len(base64.b64decode(answer.images[0].data)) <= 650_000
        original = (await notebook.client.read_resource(answer.links[0].uri)).contents[0]
        assert len(base64.b64decode(original.blob)) > 1_000_000  # type: ignore[union-attr]


async def test_a_table_comes_as_text_and_a_page_with_more_than_words_as_a_resource(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
        assert "a" in answer.text
        assert "<table" not in answer.text
        assert not answer.links
        page = "<table><tr><td>1</td></tr></table><iframe src='data:text/html,map'></iframe>"
        answer = await notebook.run(f"from IPython.display import HTML\nHTML({page!r})")
        (html,) = [link for link in answer.links if link.mime_type == "text/html"]
        content = (await notebook.client.read_resource(html.uri)).contents[0]
        assert "<table" in content.text  # type: ignore[union-attr]
        assert content.mime_type == "text/html"


async def test_displays_can_be_updated_and_cleared(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run(
            "from IPython.display import display, clear_output\n"
            "print('gone')\nclear_output()\n"
            "shown = display('first', display_id=True)\nshown.update('second')"
        )
        assert "gone" not in answer.text
        assert "first" not in answer.text
        assert "second" in answer.text


async def test_the_exported_notebook_is_valid_and_has_all_outputs(
    tmp_path: Path, servers: Servers
) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        await notebook.run("x = 1\nprint('printed')\nx")
        await notebook.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
        await notebook.run("1/0")
        answer = await notebook.call("export_notebook", path="out.ipynb")
        assert not answer.failed
        text = (await notebook.client.read_resource(answer.links[0].uri)).contents[0].text  # type: ignore[union-attr]
        book = json.loads(text)
        nbformat.validate(book)
        kinds = [[out["output_type"] for out in cell["outputs"]] for cell in book["cells"]]
        assert kinds[0] == ["stream", "execute_result"]
        assert "image/png" in book["cells"][1]["outputs"][-1]["data"]
        assert kinds[2] == ["error"]


HOSTILE = """
from IPython.display import display
nested = []
for _ in range(400):
    nested = [nested]
display({"application/json": nested, "text/plain": "nested"}, raw=True)
for n in range(120):
    display({"application/json": [[]] * 90_000}, raw=True)
display({"application/json": {"k" * 1_000_000: 1}}, metadata={"m" * 3_000: [[]] * 200}, raw=True)
display({"application/json": {"n": float("nan")}}, raw=True)
for n in range(1000):
    display({"text/plain": "x"}, metadata={"a": nested}, raw=True)
"""


@pytest.mark.ways
async def test_a_notebook_of_hostile_displays_is_valid_and_costs_the_server_little() -> None:
    async with agent() as notebook:
        server = server_pid()
        await notebook.run("1")
        await notebook.run(HOSTILE)
        before = status_bytes(server, "VmRSS")
        forget_peak(server)
        answer = await notebook.call("export_notebook", path="out.ipynb")
        assert status_bytes(server, "VmHWM") - before < 100_000_000
        text = (await notebook.client.read_resource(answer.links[0].uri)).contents[0].text  # type: ignore[union-attr]
        nbformat.validate(nbformat.reads(text, as_version=4))  # type: ignore[no-untyped-call]
        outputs = json.loads(text)["cells"][1]["outputs"]
        nested, *crowds = outputs[:121]
        assert nested["data"] == {"text/plain": "nested"}
        assert "nested more than" in str(nested["metadata"]["kernel-mcp"]["left_out"])
        assert crowds[0]["data"] == {"application/json": [[]] * 90_000}
        assert "the notebook has too many values" in crowds[-1]["data"]["text/plain"]


async def test_the_record_of_a_session_reads_the_same_however_long_it_gets(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        handle = (await notebook.call("create_session")).data["session"]
        first = await notebook.run("for n in range(5000): print('line', n)", session=handle)
        await notebook.run("print('a')\n'r'", session=handle)
        await notebook.run("1/0", session=handle)
        shown = "from IPython.display import display\nh = display('old', display_id=True)"
        await notebook.run(shown, session=handle)
        for n in range(40):
            await notebook.run(f"x = {n}", session=handle)
        await notebook.run("h.update('new')", session=handle)

        async def read(uri: str) -> str:
            found = (await notebook.client.read_resource(f"kernel://{handle}/{uri}")).contents[0]
            return str(found.text)  # type: ignore[union-attr]

        whole = "".join(f"line {n}\n" for n in range(5000))
        for _ in range(2):
            assert await read("cells/1") == whole
            assert await read("cells/2") == "a\n'r'\n"
            assert "ZeroDivisionError" in await read("cells/3")
            assert await read("cells/4") == "'new'\n"
            page = await notebook.call(
                "read_file", session=handle, path=first.links[0].uri, offset=4000, limit=1
            )
            assert page.text.startswith("line 4000")
            book = json.loads(await read("notebook"))
            assert [cell["id"] for cell in book["cells"]] == [f"cell-{n}" for n in range(1, 46)]
            assert book["cells"][20]["source"] == "x = 16"
            await notebook.call("reset", session=handle)
        assert (await notebook.run("'x' in dir()", session=handle)).cell["cell"] == 46


async def test_a_flood_leaves_other_sessions_responsive(servers: Servers) -> None:
    async with servers.agent("--grace", "1") as notebook:
        calm = (await notebook.call("create_session")).data["session"]
        await notebook.run("1", session=calm)
        await notebook.run("while True: print('x' * 1000)", wait=0.5)
        for _ in range(20):
            with anyio.fail_after(60):
                await notebook.run("1", session=calm)
        stopped = await notebook.call("interrupt")
        assert stopped.status in ("interrupted", "killed")


FORKED = """
import multiprocessing, os, warnings
from IPython.display import HTML, display
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
def show(x):
    display({"x": x}, HTML("<b>bold</b>"))
if os.fork() == 0:
    display([1])
    os._exit(0)
os.wait()
with multiprocessing.get_context("fork").Pool(1) as pool: pool.map(show, [7])
import matplotlib.pyplot as plt
def draw():
    plt.plot([1, 2]); plt.show()
process = multiprocessing.get_context("fork").Process(target=draw)
process.start(); process.join()
"""


async def test_what_a_forked_process_displays_is_shown_as_text_and_the_rest_is_named() -> None:
    async with agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run(FORKED)
        left = " left out: a forked process shows text alone]"
        assert "[1]\n{'x': 7}\n" in answer.text
        assert f"[text/html{left}" in answer.text
        assert f"[image/png{left}" in answer.text
        assert not answer.images
        assert (await notebook.run("display([2])")).text == "[2]"
