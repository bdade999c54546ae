"""FROST inside other libraries. Each module imports its library when it is used, not before."""
