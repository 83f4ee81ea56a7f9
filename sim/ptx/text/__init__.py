"""PTX text: its types, what it is made of, the parser. Knows nothing of the other folders."""
