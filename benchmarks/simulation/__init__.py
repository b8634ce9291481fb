"""Measures the coordinator's work in a save of many ranks in one process. Files take the place of the other ranks.

``planning`` is the command. ``ours`` runs our coordinator, and ``stock`` runs that of ``torch.distributed.checkpoint``.
Both run the real code on the same items. Only the messages of the network are read from files and written to files.
"""
