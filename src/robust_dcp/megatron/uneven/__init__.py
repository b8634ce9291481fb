"""Where the parts of unevenly cut DTensors begin: one keyed exchange in place of a collective for each."""
