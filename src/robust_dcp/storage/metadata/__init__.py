"""The metadata file of a checkpoint: reading it, checking it, and writing it from columns."""
