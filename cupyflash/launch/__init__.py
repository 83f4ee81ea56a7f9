"""The way from a request to a launch: compile, fill the struct, run on the GPU or on the simulated device."""
