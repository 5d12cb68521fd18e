"""The frozen Hugging Face model: loading it, and forwards of it that a plan changes."""
