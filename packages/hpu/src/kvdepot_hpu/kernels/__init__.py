"""Moving blocks: which go together, and how."""
