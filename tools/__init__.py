"""What maintainers run. Not part of the installed package."""
