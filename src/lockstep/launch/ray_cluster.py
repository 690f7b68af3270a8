"""The connection to a Ray cluster."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch.ray_nodes import Node
from lockstep.package_versions import install_command

_ANSWERS_WITHIN = 10.0
_CLIENT = "ray://"
# The preface of HTTP/2 with empty settings, RFC 9113 section 3.4. A server answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


@contextmanager
def connected(address: str | None, working_dir: str | None = None) -> Iterator[Any]:
    """Be connected to a Ray cluster; give the module `ray`.

    A connection that is there already is used, and stays.

    Args:
        address: `ray://host:port`, or `host:port` of a cluster that this machine is part of;
            `None` for `RAY_ADDRESS`, the cluster of this machine, or else a new one of it.
        working_dir: A folder that Ray copies to the nodes.

    Raises:
        LaunchError: If Ray is not installed, or nobody answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise LaunchError(
            "A run on Ray was asked for, and Ray is not installed.\n"
            f"Install it: {install_command('ray')}"
        ) from None
    if ray.is_initialized():
        if address is not None or working_dir is not None:
            raise LaunchError(
                f"The address {address} was given, and Ray is connected already.\n"
                "Leave the address out, or call ray.shutdown() first."
            )
        yield ray
        return
    _check_answers(address or os.environ.get("RAY_ADDRESS", ""))
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if working_dir is not None:
        options["runtime_env"] = {"working_dir": working_dir}
    try:
        ray.init(address, **options)
    except (RuntimeError, ConnectionError, ValueError, ImportError) as error:
        raise LaunchError(
            f"Ray did not connect to {address or 'a cluster'}: {first_line(error)}\n"
            "Look at the cluster with `ray status`."
        ) from error
    try:
        yield ray
    except ConnectionError as error:
        raise LaunchError(
            f"The connection to Ray was lost: {first_line(error)}\n"
            "Ray ends the processes. With lockstep.Checkpoint, the same command goes on."
        ) from error
    finally:
        ray.shutdown()


def alive_nodes(ray: Any) -> list[Node]:
    """Return the nodes of the cluster that are alive."""
    return [
        Node(
            each["NodeID"],
            each["NodeManagerAddress"],
            int(each["Resources"].get("GPU", 0)),
            int(each["Resources"].get("CPU", 0)),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_answers(address: str) -> None:
    """Check that a server of Ray answers. Ray itself may wait without an end for one.

    Raises:
        LaunchError: If none answers.
    """
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if not colon and not address.startswith(_CLIENT):  # "", "auto" or "local"
        return
    if not host or not port.isdecimal():
        raise LaunchError(
            f"{address} was given as the address of Ray, and it has no port.\n"
            f"Give for example {_CLIENT}10.0.0.1:10001, or 10.0.0.1:6379 on a node of the cluster."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN) as server:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            server.sendall(_PREFACE)
            answer = server.recv(9)
    except (OSError, OverflowError) as error:
        why = f"nothing within {_ANSWERS_WITHIN:.0f} s" if isinstance(error, TimeoutError) else ""
        raise LaunchError(
            f"Nobody answers at {address}, the address of Ray: {why or error}.\n"
            "Start Ray there with `ray start --head`, or give its address."
        ) from None
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise LaunchError(
            f"What answers at {address} is no Ray.\n"
            f"Give the address of Ray: {_CLIENT}host:10001, or host:6379 on a node of the cluster."
        )
