"""The server: where it listens, who may ask, and how it stops.

    run(served, host="127.0.0.1", port=8000)        # returns the signal that ended it

On SIGTERM or Ctrl-C no new request is taken, waiting ones are told, and the one that is written ends after its round.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from specter_lab.errors import UserError
from specter_lab.serve.app import Limits, new_app
from specter_lab.serve.line import Line
from specter_lab.serve.model import Served

STOP_S = 10  # for open connections to end, once told
MAX_CONNECTIONS = 256
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def run(
    served: Served, *, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None, limits: Limits = Limits(),
    origins: Sequence[str] = (), on_start: Callable[[str], None] = print,
) -> int | None:  # fmt: skip
    """Serve until a signal comes.

    Args:
        port: 0 takes a free one.
        api_key: clients must send it; needed unless `host` is this machine's own.
        on_start: told the address once it is open.

    Returns:
        The number of the signal.

    Raises:
        UserError: an address that cannot be opened, or one for others without a key.
    """
    check_access(host, api_key)
    listening = open_socket(host, port)
    line = Line(served, limits.max_waiting, limits.lanes)
    hosts = None if api_key else (*LOOPBACK_NAMES, host.lower())
    app = new_app(served, line, limits=limits, api_key=api_key, hosts=hosts, origins=origins)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S,
                            limit_concurrency=MAX_CONNECTIONS)  # fmt: skip
    server = _Server(config, line)
    before = {sig: signal.signal(sig, server.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:  # a signal counts from now on; uvicorn sends it to itself again when all is closed, which changes nothing then
        on_start(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1")
        server.run(sockets=[listening])
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    return server.ended_by


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, line: Line) -> None:
        super().__init__(config)
        self._line, self.ended_by = line, None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = sig
        self._line.close()
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # some other name
        return False


def check_access(host: str, api_key: str | None) -> None:
    """Raise UserError for an address that others can reach, without a key."""
    if not api_key and not is_loopback(host):
        raise UserError(f"{host} can be reached from other machines: give --api-key (or set SPECTER_LAB_API_KEY), or leave --host "
                        f"out")  # fmt: skip


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError when there is none to be had."""
    if not 0 <= port < 2**16:
        raise UserError(f"there is no port {port}: give 0 (a free one) to {2**16 - 1}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:  # a name may be no name at all
        why = str(getattr(error, "strerror", None) or error).split(" (")[0]
        raise UserError(
            f"cannot listen on {host}:{port} ({why}): give another --host or --port (0 takes a free one)"
        ) from error
