"""Which options suit a device: measured."""
