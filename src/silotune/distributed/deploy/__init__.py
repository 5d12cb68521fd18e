"""Commands and files of a deployment: keys, parties, local federations as processes."""
