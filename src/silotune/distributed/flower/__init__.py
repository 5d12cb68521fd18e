"""The modules that talk to Flower: the ClientApp, frames in its messages, the coordinator's link, its commands."""
