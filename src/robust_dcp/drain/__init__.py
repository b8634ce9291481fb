"""Copies of checkpoints in durable storage: by a call, or in the background of the job that saves."""
