"""The machine: groups of lanes run bound code, wait at barriers, call functions."""
