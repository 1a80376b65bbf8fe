"""The depot server: `depot` decides, `loop` acts, `sessions` knows which clients live."""
