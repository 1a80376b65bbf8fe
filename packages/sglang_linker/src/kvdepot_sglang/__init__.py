"""The linker that keeps SGLang's KV cache in a kvdepot server."""
