"""The entry point of Triton's backends: with CUPYFLASH_TRITON set, `import triton` begins the simulation of the whole program."""
