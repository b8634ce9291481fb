"""The directory of a save: the claim on it, its journal and lock, the commit, and the removal of what is over."""
