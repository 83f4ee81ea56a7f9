"""The SRAM/HBM simulator: theory, replay and the PTX machine."""
