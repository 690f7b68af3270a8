"""Notices that another process of a launcher has ended, or has left after an error.

Gloo notices by itself. NCCL waits for a process that has ended, until its group is aborted. So each
process holds a connection to the first one, which breaks with either of them. The first process
closes all of them when one has broken.
"""

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lockstep.engines.torch.exchange.group import HOST

_KEY = "watch"


class RankWatch:
    """Calls a function, in a thread, when a process of the group is lost.

    Args:
        store: The store where the processes of this group meet.
        host: The host of the first process.
        rank: The number of this process.
        size: The number of processes.
        local: Whether all processes are on this host.
        lost: What to call.
    """

    def __init__(
        self,
        store: Any,
        host: str,
        rank: int,
        size: int,
        *,
        local: bool,
        lost: Callable[[], None],
    ) -> None:
        self._lost = lost
        self._sockets: list[socket.socket] = []
        if rank:
            port = int(bytes(store.get(_KEY)))
            self._sockets.append(socket.create_connection((HOST if local else host, port)))
            run = self._follow_first
        else:
            # Both families, where the host has both.
            both = not local and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(
                (HOST if local else "", 0), family=family, dualstack_ipv6=both, backlog=size
            )
            self._sockets.append(listener)
            store.set(_KEY, str(listener.getsockname()[1]))
            run = self._follow_others
        threading.Thread(target=run, name="lockstep-ranks", daemon=True).start()

    def close(self) -> None:
        """Break the connections of this process, so that the others notice it."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _follow_first(self) -> None:
        with suppress(OSError):
            self._sockets[0].recv(1)  # nothing is ever sent
        self._lost()

    def _follow_others(self) -> None:
        (listener,) = self._sockets
        with suppress(OSError, ValueError), selectors.DefaultSelector() as waiting:
            waiting.register(listener, selectors.EVENT_READ)
            while all(key.fileobj is listener for key, _ in waiting.select()):
                connection, _ = listener.accept()
                self._sockets.append(connection)
                waiting.register(connection, selectors.EVENT_READ)
        self.close()
        self._lost()
