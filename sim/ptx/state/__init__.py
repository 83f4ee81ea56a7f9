"""The state of a launch: sets of lanes, the patterns of their addresses, named tensors, findings, counts."""
