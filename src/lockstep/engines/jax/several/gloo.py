"""Gloo's thread, out of the way of the computation.

Between CPUs JAX sums over processes by gloo. Its thread asks the kernel without a pause while
a message has come that nobody has asked for yet; on a core that it shares with the
computation it then takes whole time slices, the other process waits for them, and a sum of 40
bytes takes 3.5 ms instead of 0.2 (docs/performance.md).
"""

import os
import sys
import time

_EPOLL_WAIT = "232"  # the number of the system call on x86-64, asm/unistd_64.h
_EVENTS, _MILLISECONDS = "0x40", "0xa"  # gloo/transport/tcp/loop.cc, Loop::run
_LONGEST = 0.2
"""Seconds to look for it: it is found where it waits, and it waits nearly always."""


def let_computation_first() -> bool:
    """Schedule gloo's thread so that it takes the core from no other thread of its process.

    Linux's `SCHED_BATCH` leaves the thread its share of the core: with idle priority it would
    starve, and every process with it, where another program keeps the core busy.

    Returns:
        Whether that was done. Where it was not (another system, another processor, a sandbox
        that does not show system calls or lets nothing be scheduled), all is as it was.
    """
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return False
    until = time.monotonic() + _LONGEST
    while time.monotonic() < until:
        found = [thread for thread in os.listdir("/proc/self/task") if _is_gloo(thread)]
        if found:
            try:
                for thread in found:
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
            except OSError:
                return False
            return True
        time.sleep(0.001)
    return False


def _is_gloo(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            call, *arguments = file.read().split()
    except (OSError, ValueError):
        return False
    return call == _EPOLL_WAIT and arguments[2:4] == [_EVENTS, _MILLISECONDS]
