"""Whole CUDA programs on the simulated device: their calls of the CUDA runtime, answered by the PTX machine (`cupyflash run`)."""
