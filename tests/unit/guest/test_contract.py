"""Private parts of ipykernel, IPython and jupyter_client that must exist.

ipykernel 7.x changes between minor versions. When one of these fails, look at the override named in
its comment before anything else.
"""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from ipykernel.thread import CONTROL_THREAD_NAME
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from IPython.core.profiledir import ProfileDir
from jupyter_client.session import Session

from kernel_specs.restricted.app import KernelApp
from kernel_specs.restricted.display.bundles import DisplayHook
from kernel_specs.restricted.kernel import SandboxKernel
from kernel_specs.restricted.shell import Shell
from kernel_specs.restricted.wire.session import LeanSession


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            Kernel,
            (
                "start dispatch_shell dispatch_control set_parent get_parent pre_handler_hook "
                "post_handler_hook execute_request do_execute _abort_queues _execute_sleep "
                "_aborting _publish_status _publish_status_and_flush _topic _control_lock "
                "shell_stream control_stream control_msg_types record_ports "
                "_supports_kernel_subshells interrupt_request shutdown_request iopub_socket "
                "stdin_socket ident"
            ),
        ),
        (IPythonKernel, "_forward_input _restore_input shell_class compiler_class shell"),
        (IPKernelApp, "load_connection_info write_connection_file session log"),
        (
            InteractiveShell,
            (
                "run_cell_async should_run_async transform_cell showtraceback _get_exc_info "
                "user_expressions payload_manager var_expand getoutput run_line_magic "
                "run_cell_magic init_environment system_raw automagic"
            ),
        ),
        (
            ZMQInteractiveShell,
            "_showtraceback system_piped system displayhook_class ask_exit payloadpage_page",
        ),
        (ZMQShellDisplayHook, "quiet log_output session pub_socket topic start_displayhook"),
        (ZMQDisplayPublisher, "session pub_socket"),
        (ProfileDir, "_mkdir location"),
        (CachingCompiler, "format_code_name get_code_name cache"),
        (
            Session,
            (
                "msg msg_header serialize send feed_identities deserialize sign auth msg_id "
                "digest_history_size"
            ),
        ),
    ],
)
def test_overridden_and_called_names_exist(owner: type, names: str) -> None:
    missing = [name for name in names.split() if not hasattr(owner, name)]
    assert missing == []


@pytest.mark.parametrize(
    ("stock", "ours", "name"),
    [
        (IPythonKernel, SandboxKernel, "do_execute"),
        (IPythonKernel, SandboxKernel, "execute_request"),
        (IPythonKernel, SandboxKernel, "set_parent"),
        (Kernel, SandboxKernel, "_abort_queues"),
        (InteractiveShell, Shell, "showtraceback"),
        (InteractiveShell, Shell, "getoutput"),
        (InteractiveShell, Shell, "run_line_magic"),
        (InteractiveShell, Shell, "run_cell_magic"),
        (ZMQInteractiveShell, Shell, "_showtraceback"),
        (ZMQInteractiveShell, Shell, "system_piped"),
        (ZMQInteractiveShell, Shell, "ask_exit"),
        (ZMQInteractiveShell, Shell, "payloadpage_page"),
        (ZMQShellDisplayHook, DisplayHook, "log_output"),
        (Session, LeanSession, "serialize"),
        (Session, LeanSession, "send"),
        (Session, LeanSession, "deserialize"),
        (Session, LeanSession, "feed_identities"),
    ],
)
def test_overrides_take_the_same_parameters(stock: Any, ours: Any, name: str) -> None:
    expected = list(inspect.signature(getattr(stock, name)).parameters)
    assert list(inspect.signature(getattr(ours, name)).parameters) == expected


def test_a_cell_is_run_with_these_arguments() -> None:
    parameters = inspect.signature(InteractiveShell.run_cell_async).parameters
    used = {"store_history", "silent", "transformed_cell", "preprocessing_exc_tuple", "cell_id"}
    assert used <= set(parameters)
    result = ExecutionResult(ExecutionInfo("code", True, False, True, None))  # type: ignore[no-untyped-call]
    assert result.error_before_exec is None
    assert result.error_in_exec is None


def test_control_requests_are_told_by_the_name_of_the_thread() -> None:
    assert CONTROL_THREAD_NAME == "Control"
    assert "CONTROL_THREAD_NAME" in inspect.getsource(Kernel.get_parent)


def test_control_keeps_what_every_client_asks_there() -> None:
    kept = set(SandboxKernel.control_msg_types)
    assert {"kernel_info_request", "interrupt_request", "shutdown_request"} <= kept
    assert "execute_request" not in kept


def test_without_a_shell_channel_thread_there_are_no_subshells() -> None:
    assert "shell_channel_thread" in inspect.getsource(
        Kernel._supports_kernel_subshells.fget  # type: ignore[attr-defined]
    )


def test_text_streams_can_change_their_pace() -> None:
    stream: Any = io.TextIOWrapper(io.BytesIO())
    stream._CHUNK_SIZE = 65536
    assert stream._CHUNK_SIZE == 65536
    stream.reconfigure(write_through=True, line_buffering=True)


def test_the_application_is_still_an_ipykernel_application() -> None:
    assert issubclass(KernelApp, IPKernelApp)
