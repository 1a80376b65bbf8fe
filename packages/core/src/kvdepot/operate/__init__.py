"""The command line, HTTP and the live view: operators' access to a depot."""
