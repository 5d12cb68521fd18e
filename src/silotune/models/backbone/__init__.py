"""The frozen Hugging Face model: loading, target modules, hooks, stacking of views."""
