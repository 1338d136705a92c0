"""The hostile kernel as the program of a kernel spec: MODE CONNECTION_FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from tests.escape.hostile_kernel import DELIM, MIB, MODES, Peer
else:  # inside, the two files are all there is
    sys.path.insert(0, str(Path(__file__).parent))
    from hostile_kernel import DELIM, MIB, MODES, Peer

LIES: dict[str, Any] = {
    "status": "ok",
    "banner": "b" * MIB,
    "language_info": {"name": ["x"], "version": "\x1b[31m" + "9" * MIB, "mimetype": {"a": 1}},
}
"""Its description of itself."""


class Program(Peer):
    """It answers requests for its description, and cells as its mode says."""

    def __init__(self, connection: dict[str, Any]) -> None:
        self._addresses = {
            1: connection["shell_port"],
            2: connection["iopub_port"],
            4: connection["control_port"],
        }
        self._place = f"{connection['transport']}://{connection['ip']}"
        super().__init__("", connection["key"])

    def _bind(self, kind: int, port: int) -> Any:
        made = self.context.socket(kind)
        made.linger = 0
        if kind == zmq.XPUB:
            made.set(zmq.XPUB_NODROP, 1)
        between = ":" if self._place.startswith("tcp") else "-"
        made.bind(f"{self._place}{between}{self._addresses[port]}")
        return made

    def run(self, mode: str) -> None:
        """Answer one request after the other."""
        while True:
            if self.iopub.poll(0):
                self.iopub.recv()  # a subscription, which nobody is welcomed for
            if not self.shell.poll(10):
                continue
            parts = self.shell.recv_multipart()
            self.client = parts[0]
            header = json.loads(parts[parts.index(DELIM) + 2])
            if header["msg_type"] == "execute_request":
                MODES.get(mode, Peer.honest)(self, header)
            else:
                self.publish("status", header, {"execution_state": "busy"})
                self.reply("kernel_info_reply", header, LIES)


if __name__ == "__main__":
    Program(json.loads(Path(sys.argv[2]).read_text())).run(sys.argv[1])
