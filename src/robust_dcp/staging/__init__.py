"""The way between devices and files: blocks of memory, and the bytes of tensors."""
