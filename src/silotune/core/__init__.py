"""Building blocks without any knowledge of learning, used by all rooms; `core` imports no other room."""
