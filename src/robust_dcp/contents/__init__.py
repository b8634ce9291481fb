"""What a checkpoint holds, and whether it is whole: by the code that loads, without a target."""
