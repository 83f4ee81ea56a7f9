"""The results of a launch: findings, and counts by instruction, line and tensor."""
