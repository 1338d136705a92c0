"""JupyterLab on the sessions of running servers: `kernel-mcp lab`.

JupyterLab has the rights of the user who started it, so an output that ran a script there would
have escaped the sandbox. `endpoints.plain` rewrites all outputs of a session, so that nothing in
them can run, trusted or not. There are three further defences. A content security policy applies to
the page. Everything else that could run code is absent: terminals, other kernels, files, and
viewers of types with scripts. `request_filter` refuses all requests that the page does not need.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

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
"""Parts of JupyterLab that render active content, or that start anything but sessions."""
NEEDED = (
    "@jupyter/collaboration-extension",
    "@jupyter/docprovider-extension",
    "jupyterlab_pygments",
)
"""Extensions of the page that come with `kernel-mcp[lab]`."""
OWN = Path(__file__).parent / "extensions"
"""Folder of the page's own extension, which describes the kernels of sessions."""
EXTENSIONS = {"jupyterlab": True, "jupyter_server_ydoc": True, "jupyter_server_fileid": True}
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'{scripts}; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy of the page. 'unsafe-eval' is for its validation of settings; text of a
session never becomes a script."""


def run_lab(state: Path, port: int) -> NoReturn:
    """Serve JupyterLab on loopback until a signal arrives, then end the process."""
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-lab-") as place:
        folder = Path(place)
        _leave_out_settings(folder)
        from jupyter_server.serverapp import ServerApp
        from traitlets.config import Config

        from kernel_mcp.lab.request_filter import guard

        class Server(ServerApp):  # type: ignore[misc]
            @property
            def config_file_paths(self) -> list[str]:
                return []

        config = Config(_config(state, folder, port))
        server = Server.instance(config=config, jpserver_extensions=dict(EXTENSIONS))
        server.initialize(argv=[], find_extensions=False, starter_extension="lab")
        guard(server.web_app)
        said = f"JupyterLab with the sessions of this user: {server.display_url}"
        server.io_loop.add_callback(partial(print, said, flush=True))  # once it listens
        server.start()
    sys.stdout.flush()
    os._exit(0)  # threads of anyio wait for work of tasks that the loop has left behind


def _leave_out_settings(folder: Path) -> None:
    """Make JupyterLab ignore all settings and extensions of the user, environment and machine.

    Some extensions render active content. Settings may hold a token that others know, or name
    another kernel server.
    """
    for name in [each for each in os.environ if each.startswith("JUPYTER")]:
        del os.environ[name]
    for name in ("CONFIG", "DATA", "RUNTIME"):
        os.environ[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
    os.environ["JUPYTER_CONFIG_PATH"] = str(folder / "first")
    os.environ["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    os.environ["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    config = folder / "first" / "labconfig"
    config.mkdir(parents=True)
    disabled = {**dict.fromkeys(_others(), True), **dict.fromkeys(LEFT_OUT, True)}
    page = {"disabledExtensions": {**disabled, **dict.fromkeys(NEEDED, False)}}
    (config / "page_config.json").write_text(json.dumps(page), encoding="utf-8")


def _others() -> list[str]:
    """Return the names of extensions in this environment that are not needed."""
    from jupyter_core.paths import jupyter_path
    from jupyterlab_server.config import get_federated_extensions

    found = get_federated_extensions(jupyter_path("labextensions"))
    return [name for name in found if name not in NEEDED]


def _config(state: Path, folder: Path, port: int) -> dict[str, Any]:
    from kernel_mcp.lab.contents import SessionContents
    from kernel_mcp.lab.kernels import NotebookSessions, SessionKernels, SessionSpecs
    from kernel_mcp.lab.sessions import Sessions

    own = {"sessions": Sessions(state)}
    root = folder / "root"
    root.mkdir()
    return {
        "Application": {"log_level": "WARN"},
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
        },
        "LabApp": {
            "extension_manager": "readonly",
            "extra_labextensions_path": [str(OWN)],
            "news_url": None,
            "lock_all_plugins": True,
        },
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


def _scripts(page: str) -> list[str]:
    behind = page.split("<script>")[1:]
    return [each.partition("</script>")[0] for each in behind]


def policy() -> str:
    """Return the Content-Security-Policy, which permits the inline script of JupyterLab's page."""
    import jupyterlab

    page = (Path(jupyterlab.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
    digests = [hashlib.sha256(each.encode()).digest() for each in _scripts(page)]
    words = [f" 'sha256-{base64.b64encode(each).decode()}'" for each in digests]
    return POLICY.format(scripts="".join(words))
