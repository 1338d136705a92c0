"""Authentication of requests, check of scopes, and the challenge for clients that fail them."""

from __future__ import annotations

from base64 import b64decode
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

    async def login(self, authorization: str) -> str:
        """Return the `Authorization` header for the token that a browser sends as a password.

        Raises RequestRefused (401) without a valid one, so that the browser asks the person for it.
        """
        scheme, _, text = authorization.partition(" ")
        try:
            login = b64decode(text, validate=True).decode() if scheme.lower() == "basic" else ""
        except ValueError:
            login = ""
        bearer = f"Bearer {login.partition(':')[2]}"
        try:
            await self.authenticate(bearer, RUN)
        except RequestRefused as refused:
            if refused.status != 401:
                raise
            challenge = {"www-authenticate": 'Basic realm="kernel-mcp: your token as password"'}
            raise RequestRefused(401, refused.reason, _LOG_IN, challenge) from None
        return bearer

    async def authenticate(self, authorization: str, needed: str) -> Principal:
        """Return the principal of an `Authorization` header.

        Raises RequestRefused: 401 without a valid token, 403 if it lacks the scope `needed`, and
        503 if it could not be verified.
        """
        if self.verifier is None:
            return Principal(scopes=OPERATOR, grants=())
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise self._refused(401, INVALID_TOKEN, _NO_TOKEN, needed, told=False)
        try:
            who = await self.verifier.verify(token.strip())
        except Unauthenticated as error:
            raise self._refused(401, INVALID_TOKEN, str(error), needed) from None
        except KernelMcpError as error:
            raise RequestRefused(503, "verifier", str(error), {"retry-after": "10"}) from None
        if needed not in who.scopes:
            text = f"This token lacks the scope {needed}. Ask for one that has it."
            raise self._refused(403, INSUFFICIENT_SCOPE, text, needed, who.name)
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
        text = f"This token lacks the scope {INSTALL}, which `install` takes."
        raise self._refused(403, INSUFFICIENT_SCOPE, text, f"{RUN} {INSTALL}", who.name)

    def _refused(
        self, status: int, code: str, text: str, scope: str, principal: str = "", told: bool = True
    ) -> RequestRefused:
        """Return a refusal whose challenge and body have the error `code` of RFC 6750.

        The challenge has none unless `told`: a request without a token gets none (section 3.1).
        """
        fields = {"realm": "kernel-mcp"}
        if told:
            fields["error"] = code
        if self.metadata is not None and scope == RUN and code != INSUFFICIENT_SCOPE:
            # clients register for the scopes of the first challenge, so it lists all of them
            scope = " ".join(SCOPES)
        fields["scope"] = scope
        if self.metadata is not None:
            fields["resource_metadata"] = self._metadata_url
        challenge = "Bearer " + ", ".join(f'{name}="{value}"' for name, value in fields.items())
        reason = "unauthenticated" if status == 401 else "forbidden"
        return RequestRefused(
            status, reason, text, {"www-authenticate": challenge}, principal, code
        )


INVALID_TOKEN, INSUFFICIENT_SCOPE = "invalid_token", "insufficient_scope"
_LOG_IN = "Log in with your token of this server as the password; any user name will do."
_NO_TOKEN = (
    "A token is missing: send `Authorization: Bearer TOKEN`. `kernel-mcp token add NAME` makes one."
)
