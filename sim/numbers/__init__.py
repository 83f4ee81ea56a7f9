"""Numbers: attention in NumPy, when a result is right, and the inputs that are drawn."""
