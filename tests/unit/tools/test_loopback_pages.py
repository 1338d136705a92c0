"""The page on which a person types a secret for code, by raw requests."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from kernel_mcp.sessions.questions import Question
from kernel_mcp.tools.answer_pages import BODY_BYTES, Asked
from kernel_mcp.tools.loopback_pages import HEAD_BYTES, LoopbackPages

pytestmark = [pytest.mark.anyio]
ASKED = Question("3-1", 3, "<b>Token</b>?", secret=True)


class Given:
    """The pages of one question, and what was typed on them."""

    def __init__(self) -> None:
        self.pages = LoopbackPages()
        self.values: list[str] = []
        self.waits = True

    async def give(self, value: str) -> bool:
        self.values.append(value)
        return self.waits

    async def url(self) -> str:
        return await self.pages.url_of(Asked("", "owner"), ASKED, self.give)


async def send(url: str, head: str, body: bytes = b"", **headers: str) -> str:
    """The response to a raw request, whose first line lacks the version."""
    place = urlsplit(url)
    fields = {"Host": place.netloc, "Content-Length": str(len(body)), **headers}
    lines = [f"{head} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    text = (await reader.read()).decode()
    writer.close()
    return text


async def test_a_page_takes_one_answer() -> None:
    given = Given()
    url = await given.url()
    assert await given.url() == url
    path = urlsplit(url).path
    page = await send(url, f"GET {path}")
    assert page.startswith("HTTP/1.1 200 OK")
    assert "Code in notebook cell 3 asks: &lt;b&gt;Token&lt;/b&gt;?" in page
    assert 'type="password"' in page
    assert "Referrer-Policy: no-referrer" in page
    assert "frame-ancestors 'none'" in page
    sent = await send(url, f"POST {path}", b"answer=s3%26cr+et")
    assert "Sent" in sent
    assert given.values == ["s3&cr et"]
    with pytest.raises(ConnectionRefusedError):  # the last page is gone, and so is the socket
        await send(url, f"POST {path}", b"answer=again")


async def test_code_that_no_longer_waits_is_told_of() -> None:
    given = Given()
    given.waits = False
    url = await given.url()
    assert "no longer waits" in await send(url, f"POST {urlsplit(url).path}", b"answer=x")


@pytest.mark.parametrize(
    ("status", "head", "body", "headers"),
    [
        (404, "GET /", b"", {}),
        (404, "GET /wrong", b"", {}),
        (404, "POST {}x", b"answer=x", {}),
        (421, "GET {}", b"", {"Host": "evil.example"}),
        (403, "POST {}", b"answer=x", {"Origin": "http://evil.example"}),
        (400, "POST {}", b"other=x", {}),
        (400, "POST {}", b"answer=\xff", {}),
        (400, "POST {}", b"a=1&b=2&c=3&d=4&answer=5", {}),
        (405, "PUT {}", b"answer=x", {}),
        (400, "GET {}\x00", b"", {}),
        (413, "POST {}", b"answer=" + b"x" * BODY_BYTES, {}),
    ],
)
async def test_other_requests_are_refused(
    status: int, head: str, body: bytes, headers: dict[str, str]
) -> None:
    given = Given()
    url = await given.url()
    answer = await send(url, head.format(urlsplit(url).path), body, **headers)
    assert answer.startswith(f"HTTP/1.1 {status} "), answer[:100]
    assert given.values == []
    given.pages.close("owner")


async def test_a_head_without_end_is_refused() -> None:
    given = Given()
    url = await given.url()
    for filler in ("x", " ", "é"):
        answer = await send(url, "GET /", b"", X=filler * 4 * HEAD_BYTES)
        assert answer.startswith("HTTP/1.1 4"), answer[:100]
    given.pages.close("owner")


async def test_pages_of_one_owner_are_removed() -> None:
    given = Given()
    url = await given.url()
    other = await given.pages.url_of(Asked("", "other"), ASKED, given.give)
    given.pages.close("owner")
    assert (await send(url, f"GET {urlsplit(url).path}")).startswith("HTTP/1.1 404")
    assert (await send(other, f"GET {urlsplit(other).path}")).startswith("HTTP/1.1 200")
    given.pages.close("other", "3-1")
