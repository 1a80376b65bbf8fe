"""kvdepot's connector for vLLM. Importing it loads neither vLLM nor torch; `connector` is what vLLM loads by name."""
