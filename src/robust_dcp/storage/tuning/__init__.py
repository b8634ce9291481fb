"""Measures which options suit a device."""
