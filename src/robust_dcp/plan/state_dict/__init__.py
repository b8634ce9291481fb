"""What a rank saves: the items of its state dict, their structure, and their data when it is written."""
