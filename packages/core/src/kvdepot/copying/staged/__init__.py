"""Copies through staging memory of the host, for devices that torch drives and whose memory no other process can open.

Backends hand in a `Bridge`, the only access to torch and the device, and get a `Copier`. Tensors are recognised by
their attributes: nothing here imports torch.

- `bridge`: the device.
- `moves`: which blocks go together, pure.
- `copy`: gather, stage, copy, and back.
"""
