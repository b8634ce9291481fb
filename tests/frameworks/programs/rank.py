"""What torchrun starts on each rank: ``rank.py PROGRAM ARGUMENTS``. It runs a program as Python would."""

import atexit
import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if "ROBUST_DCP" not in os.environ:
        # After the work of a job of stock torch a thread of gloo has now and then aborted the process at Python's end
        # ("terminate called without an active exception"). So it ends without that. Ours may not need it.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
