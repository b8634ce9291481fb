"""Parts of ``benchmarks.storage``: the state dicts, the contenders, the measurement, and the drive's own speed."""
