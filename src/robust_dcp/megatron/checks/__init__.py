"""What ranks tell each other before a save or a load: who holds what, and whether the rest is the same everywhere."""
