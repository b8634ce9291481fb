"""Listeners that send what saves and loads tell to monitoring systems. Each needs only its own package."""
