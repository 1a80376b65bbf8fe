"""The depot server: `depot` decides, `loop` acts, `sessions` knows who lives."""
