"""The template: a process that has imported everything and forks kernels, each in a sandbox.

Runs inside an outer bubblewrap that hides the host, on the standard library alone until the
template proper loads the restricted kernel. No user code ever runs here.

    start       entry point
    enter       a user namespace whose root is nobody on the host → Keeper
    keeper      Keeper: takes requests, makes a sandbox per kernel, outlives the forker
    cell        the sandbox of one kernel, held by its init process: namespaces, mounts, identity
    forker      the template proper: preload, then fork kernels into prepared sandboxes
    warmup      what the template proper loads
    rehearsal   a first cell that nobody sees, for what it leaves in caches
    heirlooms   what must not be handed down by a fork
    pools       native thread pools
    privileges  give up capabilities, install the system call filter
    linux       the system calls that Python does not wrap
    packets     JSON messages with file descriptors over SOCK_SEQPACKET

Processes, outermost first, `=` where a new pid namespace begins:

    bwrap = enter ── enter (both for root servers only) = keeper ─┬─ forker ── kernel (joins init's)
                                                                  └─ init = (its orphans)

The init is a small process, so that the sandbox is built while the forker copies its page tables,
and as PID 1 of the kernel's namespaces it takes everything with it when it is killed.
"""
