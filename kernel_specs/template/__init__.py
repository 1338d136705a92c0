"""The template: a process that has imported everything and forks kernels, each in a sandbox.

Runs inside an outer bubblewrap that hides the host, on the standard library alone until the
template proper loads the restricted kernel. No user code ever runs here.

    start    entry point
    enter    a user namespace whose root is an ordinary user of the host → init
    init     process 1: takes requests, makes a sandbox per kernel, outlives the zygote
    cell     the sandbox of one kernel, held by its init process: namespaces, mounts, identity
    zygote   the template proper: preload, then fork kernels into prepared sandboxes
    prewarm  what it loads, a first cell for what that leaves in caches, what no fork may hand down
    linux    the system calls that Python does not wrap, messages with file descriptors

Processes, outermost first, `=` where a new pid namespace begins:

    bwrap = enter ── enter (both for root servers only) = init ─┬─ zygote ── kernel (joins init's)
                                                                └─ init = (its orphans)

The init is a small process, so that the sandbox is built while the zygote copies its page tables,
and as PID 1 of the kernel's namespaces it takes everything with it when it is killed.
"""
