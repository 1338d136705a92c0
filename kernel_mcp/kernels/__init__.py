"""One live kernel: its channels, the wire protocol, and how one comes about for a session."""
