"""The commands, a file each; what they are called stands in `conjoin.cli.main`."""
