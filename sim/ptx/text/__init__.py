"""PTX text: its types, its syntax, the parser. Knows nothing of the other folders."""
