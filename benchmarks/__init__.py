"""Benchmarks. Each is a command that prints a table and writes JSON."""
