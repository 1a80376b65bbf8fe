"""The depot server: `depot` decides, `loop` does the I/O, `sessions` tracks which clients are alive."""
