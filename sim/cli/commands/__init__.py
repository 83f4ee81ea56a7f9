"""The commands, declared without NumPy: options, help, examples. The modules beside this folder do their work."""
