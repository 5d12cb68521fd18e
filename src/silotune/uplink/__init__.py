"""What an update passes before it leaves a silo."""
