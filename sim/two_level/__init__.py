"""The two-level memory, SRAM over HBM: replays a schedule's moves and counts their bytes."""
