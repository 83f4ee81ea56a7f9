"""What happens before what, and the races that follow: clocks of barriers, fences and atomics, and who touched each byte."""
