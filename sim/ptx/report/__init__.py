"""What a launch has to say: findings, and counts by instruction, line and tensor."""
