"""Reuses KV that is not a prefix, inside a vLLM worker.

`blender.Blender` is the facade: it finds the layers, moves KV to other positions, runs the model over scattered
positions of a prompt, and chooses the tokens to recompute by a policy. At start, `setup` checks that all of this
works for the model. `supported` refuses engines that cannot blend.
"""
