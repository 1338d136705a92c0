"""The restricted kernel: boot order, tuned ipykernel, import guard.

Runs inside the sandboxed process, on the standard library and ipykernel alone.

    boot        entry point: argv and boot.json → KernelHost
    config      boot.json as frozen values
    confine     process, environment and resource limits before anything else
    guard       import guard (a guard rail, not the boundary)
    host        KernelHost: preload (before a fork), serve (after it)
    app         IPKernelApp with five sockets and one extra thread
    kernel      IPythonKernel with the lean request path
    shell       ZMQInteractiveShell without tee, history and colours
    tracebacks  plain tracebacks
    session     Jupyter messages, serialised with less work
    zmtp        the protocol below Jupyter's, for both ends
    peers       the clients of one socket
    sockets     ROUTER and XPUB sockets without a thread of their own
    iopub       the XPUB socket, one ordered queue, backpressure
    console     stdout, stderr and file descriptors 1 and 2 → iopub
    channel     a ROUTER on an event loop
    service     the service thread: control, subscriptions, pipes, flush timer
    interrupts  what SIGINT means at this moment
    variables   names of the session, described without running user code
    denied      builtins that a strict policy takes away
    layers      package layers on sys.path, which grow while the kernel runs
    imports     imports that the host asks for after an installation
    script      a cell that begins and ends as a program does
    trial       entry point: the same in a process that is thrown away
    recorder    the end of the output, in memory that outlives a sudden death
    snapshot    variables taken out of one kernel and brought back in another
    dumps       their bytes, made without copies
    pickles     what cells define, pickled
    watch       time limits and interrupts for objects that are being pickled
    reasons     why a variable cannot leave
"""
