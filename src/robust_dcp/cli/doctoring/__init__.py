"""What ``robust-dcp doctor`` looks at. Nothing here imports torch."""
