"""What a launch works on: sets of lanes, the patterns of their addresses, named tensors, the host's floating-point environment."""
