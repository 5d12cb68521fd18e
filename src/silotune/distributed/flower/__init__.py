"""The modules that talk to Flower.

- `client_app`: hands a message to the silo's worker
- `frame_message`: a frame inside a Flower message
- `link`: the coordinator's connection to its nodes
- `commands`: the command lines of Flower's processes
"""
