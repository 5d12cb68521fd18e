"""The messages between coordinator and silos, and the checks on both sides.

- `frames`: a JSON header and blobs of bytes, on sockets and in Flower's messages; the protocol's number
- `handshake`: each side's identity, compared before round 1 and with every request
- `agreement`: the configuration without local paths, and its comparison with the one agreed on
- `disclosure`: the metrics and scores that may leave a silo, and the coordinator's check of them
"""
