"""The command line as `python -m cupyflash`."""

from cupyflash.sim.cli import main

if __name__ == "__main__":
    main()
