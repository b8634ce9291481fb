"""Turns a checkpoint, or a file of `torch.save`, into another form, a few pieces of tensors at a time."""
