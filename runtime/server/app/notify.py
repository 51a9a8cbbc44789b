"""Messages to the service manager, by the protocol of sd_notify(3): datagrams to the socket NOTIFY_SOCKET.

READY=1 once the server takes requests, STOPPING=1 when its drain begins, and WATCHDOG=1 twice in each
interval WATCHDOG_USEC while the event loop runs and the engine has not closed for good. Nothing is sent where
these variables are not set.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable


def notify(message: str) -> None:
    """Send `message`, such as "READY=1". A manager that does not listen any more is no error."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            # A name that begins with @ is one of Linux's abstract namespace.
            sender.sendto(message.encode(), path.replace("@", "\0", 1) if path[0] == "@" else path)
        except OSError:
            return


async def keep_alive(works: Callable[[], bool]) -> None:
    """Send WATCHDOG=1 while `works()` is true, until this coroutine is cancelled. Returns at once if the
    manager has no watchdog for this process."""
    interval = os.environ.get("WATCHDOG_USEC", "")
    if not interval.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        if works():
            notify("WATCHDOG=1")
        await asyncio.sleep(int(interval) / 2e6)
