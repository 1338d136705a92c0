"""Sessions of Deno: what its display protocol shows, and a start for which memory is short."""

from __future__ import annotations

import pytest

from tests.contracts.interpreter import COLD
from tests.integration.servers import Servers
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.full]

OWN = (
    "({ [Symbol.for('Jupyter.display')]: () => ({ 'text/plain': 'a', 'text/html': '<canvas/>' }) })"
)
SHOWN = {
    "Deno.jupyter.html`<h1>Title</h1><p>words</p>`": ("Title\nwords", "text/html"),
    OWN: ("a", "text/html"),
    "Deno.jupyter.md`# Title`": ("# Title", ""),
    "({ a: 1, b: [1, 2] })": ("{ a: 1, b: [ 1, 2 ] }", ""),
}


async def test_values_are_shown_as_their_display_protocol_says(servers: Servers) -> None:
    flags = (*COLD, "--memory", "1500M", "--kernel", kernel_flag("deno"))
    async with servers.agent(*flags) as notebook:
        await notebook.call("create_session", name="x", language="deno")
        for code, (text, page) in SHOWN.items():
            answer = await notebook.run(code, session="x")
            while "(no output)" in answer.text:  # it may follow the end of its cell
                answer = await notebook.run("undefined", session="x")
            assert text in answer.text
            assert [link.mime_type for link in answer.links] == ([page] if page else [])


async def test_a_start_for_which_memory_is_short_says_what_to_do(servers: Servers) -> None:
    flags = (*COLD, "--memory", "1G", "--kernel", kernel_flag("deno"))
    async with servers.agent(*flags) as notebook:
        text = await notebook.refused("create_session", language="deno")
    assert "memory may be short: the limit is 1 GiB" in text
