"""The coordinator's work in a save of many ranks, measured in one process: the other ranks are files.

``planning`` is the command. ``ours`` runs our coordinator, ``stock`` that of ``torch.distributed.checkpoint``; both run
the real code on the same items, and only what goes over the network is read from, or written to, files.
"""
