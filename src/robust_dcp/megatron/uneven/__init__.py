"""Finds where the parts of unevenly cut DTensors begin, by one exchange in place of a collective for each DTensor."""
