"""JupyterLab on the sessions of running servers: `kernel-mcp lab`.

JupyterLab has the rights of whoever has started it, so an output that ran a script there would have
left the sandbox. What reaches it of a session is written by `fronts.plain`, and nothing in it can
run, trusted or not. Behind that stand a policy for content, and the absence of what else could run
code: terminals, other kernels, files, and viewers of types with scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

LEFT_OUT = (
    "@jupyterlab/apputils-extension:announcements",
    "@jupyterlab/csvviewer-extension",
    "@jupyterlab/debugger-extension",
    "@jupyterlab/extensionmanager-extension",
    "@jupyterlab/help-extension:jupyter-forum",
    "@jupyterlab/htmlviewer-extension",
    "@jupyterlab/hub-extension",
    "@jupyterlab/imageviewer-extension",
    "@jupyterlab/javascript-extension",
    "@jupyterlab/markdownviewer-extension",
    "@jupyterlab/mathjax-extension",
    "@jupyterlab/mermaid-extension",
    "@jupyterlab/pdf-extension",
    "@jupyterlab/terminal-extension",
    "@jupyterlab/vega5-extension",
)
"""Parts of JupyterLab that draw what could run, or that start what is no session."""
EXTENSIONS = {"jupyterlab": True, "jupyter_server_ydoc": True, "jupyter_server_fileid": True}
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'{scripts}; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""'unsafe-eval' is for the check of settings; no text of a session is ever a script's."""
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def run_lab(state: Path, port: int) -> int:
    """Serve JupyterLab on loopback until a signal arrives; its exit code."""
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-lab-") as place:
        folder = Path(place)
        _leave_out_settings(folder)
        from jupyter_server.serverapp import ServerApp
        from traitlets.config import Config

        config = Config(_config(state, folder, port))
        server = ServerApp.instance(config=config, jpserver_extensions=dict(EXTENSIONS))
        server.initialize(argv=[], find_extensions=False, starter_extension="lab")
        print(f"JupyterLab with the sessions of this user: {server.display_url}", flush=True)
        server.start()
    return 0


def _leave_out_settings(folder: Path) -> None:
    """Have no settings and extensions of the user's loaded: some draw what could run."""
    for name in ("CONFIG", "DATA", "RUNTIME"):
        os.environ[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
    for name in ("JUPYTER_CONFIG_PATH", "JUPYTER_PATH"):
        os.environ.pop(name, None)
    os.environ["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    os.environ["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    config = folder / "config" / "labconfig"
    config.mkdir(parents=True)
    page = {"disabledExtensions": dict.fromkeys(LEFT_OUT, True)}
    (config / "page_config.json").write_text(json.dumps(page), encoding="utf-8")


def _config(state: Path, folder: Path, port: int) -> dict[str, Any]:
    from kernel_mcp.lab.contents import SessionContents
    from kernel_mcp.lab.joined import Sessions
    from kernel_mcp.lab.kernels import NotebookSessions, SessionKernels, SessionSpecs

    own = {"sessions": Sessions(state)}
    root = folder / "root"
    root.mkdir()
    return {
        "ServerApp": {
            "ip": "127.0.0.1",
            "port": port,
            "open_browser": False,
            "allow_root": True,
            "allow_remote_access": False,
            "root_dir": str(root),
            "default_url": "/lab",
            "terminals_enabled": False,
            "quit_button": False,
            "contents_manager_class": type("Contents", (SessionContents,), own),
            "kernel_manager_class": type("Kernels", (SessionKernels,), own),
            "session_manager_class": NotebookSessions,
            "kernel_spec_manager_class": SessionSpecs,
            "tornado_settings": {"headers": {"Content-Security-Policy": policy()}},
            "log_level": "WARN",
        },
        "LabApp": {"extension_manager": "readonly", "news_url": None},
        "FileIdExtension": {
            "file_id_manager_class": "jupyter_server_fileid.manager.ArbitraryFileIdManager"
        },
        "BaseFileIdManager": {"db_path": str(folder / "ids.db")},
        "YDocExtension": {
            "ystore_class": "jupyter_server_ydoc.stores.TempFileYStore",
            "document_cleanup_delay": None,
            "file_poll_interval": 0,
            "session_store_path": str(folder / "collaboration.json"),
        },
        "AsyncMappingKernelManager": {"default_kernel_name": "python3"},
    }


def policy() -> str:
    """The policy for content, with the one script that JupyterLab's page has in itself."""
    import jupyterlab

    page = (Path(jupyterlab.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
    digests = [hashlib.sha256(each.encode()).digest() for each in _SCRIPT.findall(page)]
    words = [f" 'sha256-{base64.b64encode(each).decode()}'" for each in digests]
    return POLICY.format(scripts="".join(words))
