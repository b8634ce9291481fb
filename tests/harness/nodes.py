"""Ranks on pretended nodes: each sees a directory of its own under the same path, as with drives in each machine.

A rank that calls :func:`become_node` gets a mount namespace of its own, in which another directory lies over the path,
and a host name. Linux only; it needs the right to make namespaces, which root has, and others where the kernel allows
user namespaces.

    def save_on_two_nodes(path: str, nodes: str) -> None:
        node = int(os.environ["RANK"]) // 2
        become_node(f"node{node}", path, f"{nodes}/{node}")      # before any thread is started
        dist.init_process_group("gloo")
        robust_dcp.save(state_dict, checkpoint_id=f"{path}/step_1")

    values(run_ranks(4, save_on_two_nodes, str(path), str(nodes), init=False))
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["become_node", "can_become_node"]

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_REPOSITORY = Path(__file__).parents[2]


def become_node(host: str, path: str | os.PathLike[str], own: str | os.PathLike[str]) -> None:
    """Make this thread, and those that it starts from now on, see ``own`` under ``path``.

    Args:
        host: the name of the pretended machine. Ranks with the same name are on one node.
        path: an existing directory.
        own: the node's directory that lies over it. It is made if it does not exist.

    Raises:
        OSError: this process may not make namespaces; or it already has threads, and is not root.
    """
    os.makedirs(own, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) != 0:
        _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWUSER))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(os.fsencode(own), os.fsencode(path), None, _MS_BIND, None))
    socket.sethostname(host)


@functools.cache
def can_become_node() -> bool:
    """Whether processes may become nodes here."""
    if sys.platform != "linux":
        return False
    code = (
        "import tempfile; from tests.harness.nodes import become_node; "
        "become_node('n', tempfile.mkdtemp(), tempfile.mkdtemp())"
    )
    return (
        subprocess.run([sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, check=False).returncode == 0
    )


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
