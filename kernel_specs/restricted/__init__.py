"""The restricted kernel: boot order, tuned ipykernel, import guard.

Runs inside the sandboxed process, on the standard library and ipykernel alone.

    boot         entry point: argv and boot.json → KernelHost
    try_import   entry point: imports in a process that is thrown away
    config       boot.json as frozen values
    confine      process, environment and resource limits before anything else
    host         KernelHost: preload (before a fork), serve (after it)
    app          IPKernelApp with five sockets and one extra thread
    kernel       IPythonKernel with the lean request path
    shell        ZMQInteractiveShell without tee, history and colours
    interrupts   what SIGINT means at this moment
    script       a cell that begins and ends as a program does
    variables    names of the session, described without running user code
    console/     streams: file descriptors 1 and 2 → iopub: one ordered queue, backpressure;
                 tracebacks: plain ones
    wire/        zmtp: the protocol below Jupyter's, for both ends; sockets: ROUTER and XPUB without
                 a thread of their own; session: messages; service: the one extra thread
    hibernation/ snapshot: variables taken out of one kernel and brought back in another; dumps,
                 loading, pickles, arrays: their bytes; attempt_limits: time and reasons
    policy/      guard: the import guard (a guard rail, not the boundary); imports: package layers
"""
