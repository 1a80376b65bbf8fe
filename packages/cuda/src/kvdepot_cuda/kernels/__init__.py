"""Kernels, each in a module that imports its compiler: loaded by who needs them, never by `import kvdepot_cuda`."""
