"""The launcher: ``torchrun -m robust_dcp.megatron pretrain_gpt.py … --ckpt-planner robust_dcp``.

It is for jobs that cannot load robust_dcp by themselves: PyTorch's autoload is off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), or the package was installed without its entry points. The script (or, after
``-m``, the module) runs as ``__main__``. It sees the same arguments as without the launcher.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import robust_dcp_autoload
from robust_dcp.megatron.installation import install

__all__ = ["main"]

USAGE = "usage: python -m robust_dcp.megatron [-m module | script.py] [arguments of the script]"


def main(arguments: Sequence[str]) -> None:
    """Install what the arguments and the environment ask for, and run the script.

    Without ``--ckpt-planner robust_dcp`` and without ``ROBUST_DCP=1``, only Megatron's parser is changed: our arguments
    are added to it.

    Raises:
        SystemExit: 2 if no script is given. What the script itself raises passes through unchanged.
    """
    is_module = bool(arguments) and arguments[0] == "-m"
    rest = list(arguments[1:] if is_module else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if rest else 2)
    sys.argv = rest
    asked_for = robust_dcp_autoload.planner_asked_for(rest, os.environ)
    install("robust_dcp" if asked_for == "robust_dcp" else "default")
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        # Python has put the current directory there because of its `-m`. A script expects its own folder.
        sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
