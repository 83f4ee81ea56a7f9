"""The request: sizes, dtype, options, score and mask functions of a call, checked once."""
