"""Kernels, each in a module that imports its compiler. Users import them; `import kvdepot_cuda` does not."""
