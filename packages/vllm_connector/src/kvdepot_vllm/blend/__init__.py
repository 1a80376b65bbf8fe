"""Reuse of KV that is not a prefix, inside a vLLM worker.

`blender.Blender` is the facade: it finds the layers, moves KV to other positions, runs the model over scattered
positions of a prompt, and chooses with a policy the tokens to compute again. `self_test` shows at start that all of it
works for this model; `refusal` names the engines that cannot blend.
"""
