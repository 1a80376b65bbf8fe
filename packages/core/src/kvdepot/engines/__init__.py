"""Parts that the connectors of all engines need: identity of models and weights, the user's settings, log lines."""
