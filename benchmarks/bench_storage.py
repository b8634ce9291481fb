"""A short form of ``benchmarks.storage``: one round of small checkpoints, ours and torch's own, in under a minute.

In such short runs drives and their caches look faster than they are. For reliable figures run
``python -m benchmarks.storage``.
"""

from __future__ import annotations

import sys

from benchmarks import storage

if __name__ == "__main__":
    who = "robust_dcp,torch FileSystemWriter"
    storage.main(["--gib", "0.0625", "--rounds", "1", "--shapes", "large,small", "--who", who, *sys.argv[1:]])
