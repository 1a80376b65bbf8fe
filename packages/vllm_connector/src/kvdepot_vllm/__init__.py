"""kvdepot's connector for vLLM, which loads `connector` by name. Importing it loads neither vLLM nor torch."""
