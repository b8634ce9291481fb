"""Checks between ranks before a save or load: who holds which shard, and whether the common state is the same."""
