"""The toolkit of backend authors: which bytes a batch moves, and how to stage them."""
