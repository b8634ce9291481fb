"""The checkpoints of a run: steps, which one is the latest, and which ones are kept."""
