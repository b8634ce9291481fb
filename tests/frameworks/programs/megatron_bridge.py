"""A program that trains with Megatron-Bridge: ``megatron_bridge.py DIRECTORY save:sync save:async`` or
``load:NAME@STEP``, which goes on from a checkpoint in the directory ``NAME``.

What it does is in ``bridge_training``, which the processes that stock Megatron starts for a save need not import.
"""

import sys

if __name__ == "__main__":
    from bridge_training import main

    main(*sys.argv[1:])
