"""Text that a display hides and a model reads: shown as escapes wherever it can come from."""

from __future__ import annotations

import json

import pytest

from tests.integration.agent import agent

pytestmark = pytest.mark.anyio

HIDDEN = tuple("\u200b\U000e0041\ufe0f\ufe0e\u202e\u2064\xad\ufeff\u3164")


async def test_no_hidden_character_reaches_a_model() -> None:
    async with agent("--allow", "*") as notebook:
        await notebook.run(
            f"hidden = {''.join(HIDDEN)!a}\n"
            "class Shy:\n    def __repr__(self): return f'<{hidden}>'\n"
            "shy = Shy()\n"
            "open('page.txt', 'w').write(f'a{hidden}b\\x1b[8mc')\n"
            "open(f'name{hidden}', 'w').close()"
        )
        code = "open(f'none{hidden}')"
        answers = [
            await notebook.run("print(hidden)"),
            await notebook.run("hidden"),
            await notebook.run("raise ValueError(hidden)"),
            await notebook.run(code),
            await notebook.call("read_file", path="page.txt"),
            await notebook.call("read_file", path=f"none{''.join(HIDDEN)}"),
            await notebook.call("list_files"),
            await notebook.call("list_variables"),
            await notebook.call("check_syntax", code=f"x = '{''.join(HIDDEN)}' +"),
            await notebook.call("create_session", name="".join(HIDDEN)),
            await notebook.call("install", packages=[f"x{''.join(HIDDEN)}"]),
        ]
        for answer in answers:
            told = answer.text + json.dumps(answer.result.structured_content, ensure_ascii=False)
            assert not [ascii(char) for char in HIDDEN if char in told]
            assert "\x1b" not in told
        assert "\\u200b\\U000e0041\\ufe0f" in answers[0].text
        assert "written as escapes here, not in the file" in answers[4].text
