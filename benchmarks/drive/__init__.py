"""Parts of ``benchmarks.storage``: what is saved, by whom, how it is measured, and what the drive itself gives."""
