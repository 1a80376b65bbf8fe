"""The features of a depot, one folder each. The kernel (`wire`, `pool`, `index`, `server`, `client`) imports none."""
