"""The short form of ``benchmarks.storage``: one round of small checkpoints, ours beside torch's own, under a minute.

Its figures are of short runs, which drives and their caches flatter: those of ``python -m benchmarks.storage`` are not.
"""

from __future__ import annotations

import sys

from benchmarks import storage

if __name__ == "__main__":
    who = "robust_dcp,torch FileSystemWriter"
    storage.main(["--gib", "0.0625", "--rounds", "1", "--shapes", "large,small", "--who", who, *sys.argv[1:]])
