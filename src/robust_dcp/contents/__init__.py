"""What a checkpoint holds, read without torch and without running or importing anything that it names."""
