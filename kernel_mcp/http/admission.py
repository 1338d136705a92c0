"""Authentication of requests, check of scopes, and the challenge for clients that fail them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.http.bodies import installs
from kernel_mcp.http.refusals import RequestRefused
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
    """Authenticates requests; without a `verifier`, all have the same unrestricted principal.

    metadata      protected resource metadata (RFC 9728); None without an issuer
    metadata_url  the address of that document, as clients reach it
    """

    def __init__(
        self, verifier: Verifier | None, metadata: Mapping[str, Any] | None, metadata_url: str
    ) -> None:
        self.verifier = verifier
        self.metadata = metadata
        self._metadata_url = metadata_url

    async def authenticate(self, authorization: str, needed: str) -> Principal:
        """Return the principal of an `Authorization` header.

        Raises RequestRefused: 401 without a valid token, 403 if it lacks the scope `needed`, and
        503 if it could not be verified.
        """
        if self.verifier is None:
            return Principal(scopes=OPERATOR, doors=())
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise RequestRefused(
                401, "unauthenticated", _NO_TOKEN, {"www-authenticate": self._challenge("", needed)}
            )
        try:
            who = await self.verifier.verify(token.strip())
        except Unauthenticated as error:
            challenge = self._challenge("invalid_token", needed)
            raise RequestRefused(
                401, "unauthenticated", str(error), {"www-authenticate": challenge}
            ) from None
        except KernelMcpError as error:
            raise RequestRefused(503, "verifier", str(error), {"retry-after": "10"}) from None
        if needed not in who.scopes:
            challenge = self._challenge("insufficient_scope", needed)
            raise RequestRefused(
                403,
                "forbidden",
                f"This token lacks the scope {needed}. Ask for one that has it.",
                {"www-authenticate": challenge},
                who.name,
            )
        return who

    def require_scopes(self, who: Principal, authorization: str, body: bytes) -> None:
        """Raise RequestRefused (403) if `body` calls `install` without that scope.

        The challenge makes a client with an issuer's token log in again for the scope. A token of
        the tokens file cannot get it that way: such calls pass, and the tool reports the error.
        """
        if self.metadata is None or INSTALL in who.scopes or not installs(body):
            return
        if authorization.partition(" ")[2].strip().startswith(TOKEN_PREFIX):
            return
        raise RequestRefused(
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
            # clients register for the scopes of the first challenge, so it lists all of them
            scope = " ".join(SCOPES)
        parts.append(f'scope="{scope}"')
        if self.metadata is not None:
            parts.append(f'resource_metadata="{self._metadata_url}"')
        return "Bearer " + ", ".join(parts)


_NO_TOKEN = (
    "A token is missing: send `Authorization: Bearer TOKEN`. `kernel-mcp token add NAME` makes one."
)
