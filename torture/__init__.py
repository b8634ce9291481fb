"""Campaigns that try to break a checkpoint, or the process that reads it; each counts what was lost."""
