"""The metadata file of a checkpoint: read, checked, and emitted from columns."""
