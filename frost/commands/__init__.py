"""What the command line does, one module per group of commands; `frost.cli` is the line itself."""
