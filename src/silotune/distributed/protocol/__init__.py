"""The messages between coordinator and silos, what both sides must have alike, and what the audit log says of them."""
