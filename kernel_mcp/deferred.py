"""Has pydantic build models when they are first used; imported before the MCP SDK.

The SDK has some four hundred, for all versions of the protocol, of which a server uses a few.
"""

from __future__ import annotations

from pydantic import BaseModel

BaseModel.model_config["defer_build"] = True
