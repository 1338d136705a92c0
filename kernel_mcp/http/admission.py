"""Who makes a request, whether its token is good for that, and else what a client does next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.http.bodies import installs
from kernel_mcp.http.refusals import Refused
from kernel_mcp.identity import (
    INSTALL,
    OPERATOR,
    RUN,
    SCOPES,
    TOKEN_PREFIX,
    Principal,
    Unauthenticated,
    Verifier,
)


class Admission:
    """Knows the principals of requests; without a `verifier` everyone is the same one.

    `metadata` is the document of the protected resource, which is at `metadata_url` of a client's
    view.
    """

    def __init__(
        self, verifier: Verifier | None, metadata: Mapping[str, Any] | None, metadata_url: str
    ) -> None:
        self.verifier = verifier
        self.metadata = metadata
        self._metadata_url = metadata_url

    async def who(self, authorization: str, needed: str) -> Principal:
        """The principal of a request, who has the scope that it needs. Raises Refused."""
        if self.verifier is None:
            return Principal(scopes=OPERATOR, doors=())
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Refused(
                401, "unauthenticated", _NO_TOKEN, {"www-authenticate": self._challenge("", needed)}
            )
        try:
            who = await self.verifier.verify(token.strip())
        except Unauthenticated as error:
            challenge = self._challenge("invalid_token", needed)
            raise Refused(
                401, "unauthenticated", str(error), {"www-authenticate": challenge}
            ) from None
        except KernelMcpError as error:
            raise Refused(503, "verifier", str(error), {"retry-after": "10"}) from None
        if needed not in who.scopes:
            challenge = self._challenge("insufficient_scope", needed)
            raise Refused(
                403,
                "forbidden",
                f"This token lacks the scope {needed}. Ask for one that has it.",
                {"www-authenticate": challenge},
                who.name,
            )
        return who

    def require_scopes(self, who: Principal, authorization: str, body: bytes) -> None:
        """Have the client of an issuer's token log in again for what the call takes beyond RUN.

        Others cannot: the tool says to them what is lacking. Raises Refused.
        """
        if self.metadata is None or INSTALL in who.scopes or not installs(body):
            return
        if authorization.partition(" ")[2].strip().startswith(TOKEN_PREFIX):
            return
        raise Refused(
            403,
            "forbidden",
            f"This token lacks the scope {INSTALL}, which `install` takes.",
            {"www-authenticate": self._challenge("insufficient_scope", f"{RUN} {INSTALL}")},
            who.name,
        )

    def _challenge(self, error: str, scope: str) -> str:
        parts = ['realm="kernel-mcp"']
        if error:
            parts.append(f'error="{error}"')
        if self.metadata is not None and scope == RUN and error != "insufficient_scope":
            # a client registers for the scopes that it is told first, and logs in for all of them
            scope = " ".join(SCOPES)
        parts.append(f'scope="{scope}"')
        if self.metadata is not None:
            parts.append(f'resource_metadata="{self._metadata_url}"')
        return "Bearer " + ", ".join(parts)


_NO_TOKEN = (
    "A token is missing: send `Authorization: Bearer TOKEN`. `kernel-mcp token add NAME` makes one."
)
