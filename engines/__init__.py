"""What can run an op. Engines import `descriptors` and this package's shared modules, never each other or `frost`."""
