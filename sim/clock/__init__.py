"""Times by models: of a pass, of a ring, of a roofline, beside benchmark measurements."""
