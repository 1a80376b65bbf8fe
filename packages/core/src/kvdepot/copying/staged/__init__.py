"""Copies through staging memory of the host, for devices that torch drives and whose memory no other can open.

Backends hand in a `Bridge`, which is all that is asked of torch and of the device, and get a `Copier` for
`kvdepot.client.transfers`. Tensors are told by their attributes; nothing here imports torch. Needs numpy.

- `arrays`: the engine's tensors, as pages and as bytes.
- `bridge`: the device.
- `moves`: which blocks go together, pure.
- `copy`: gather, stage, copy, and back.
"""
